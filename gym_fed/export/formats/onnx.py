"""ONNX, for onnxruntime and most accelerators' tools: token ids to logits."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.export.formats._program import ProgramFormat, any_shape, example_inputs
from gym_fed.export.formats.base import Options, Tolerance
from gym_fed.export.program_weights import StoredWeight

MAX_INSIDE_BYTES = 1_900_000_000
"""Maximum size in bytes of weights in the file itself, since protobuf is limited to 2 GiB; larger ones go to
``model.onnx.data``."""


class Onnx(ProgramFormat):
    """``model.onnx``, recorded by transformers' exporter and read back by onnxruntime."""

    name = "onnx"
    program = "model.onnx"
    suffix = ".onnx"
    requires = ("onnx", "onnxscript", "onnxruntime")
    reader = "onnxruntime"
    reader_libraries = ("onnxruntime",)
    quantizations = {  # noqa: RUF012 - never written to
        "float32": Tolerance(max=1e-4),
        "int8": Tolerance(max=None, top1=0.95, greedy=False),
    }
    tried = "Qwen3, Llama, Mistral, a mixture of experts; sliding windows"
    untried = "Gemma; models larger than gym-nano"

    def remedy_of(self, options: Options) -> str:
        if not self._in_8_bits(options):
            return self.remedy
        return "int8 loses too much of the model: omit --quantization; --skip-check writes it anyway"

    def write_program(self, model: Any, file: Path, options: Options) -> None:
        from transformers.exporters import OnnxConfig
        from transformers.exporters.exporter_onnx import OnnxExporter

        options.report("recording the forward pass", 0, 0)
        config = OnnxConfig(
            dynamic=True,
            dynamic_shapes=any_shape(),
            prefer_deferred_runtime_asserts_over_guards=True,
            quantizer=_int8() if self._in_8_bits(options) else None,
        )
        with _quiet_root_logger():
            program, _ = OnnxExporter().export_program(model, example_inputs(), config)
        options.report("writing the program", 0, 0)
        self.save(program, file)

    def _in_8_bits(self, options: Options) -> bool:
        return self.quantization(options) == "int8"

    def weights(self, file: Path) -> Iterator[StoredWeight]:
        import onnx
        import torch
        from onnx.numpy_helper import to_array

        stored = {one.name: to_array(one) for one in onnx.load(file).graph.initializer}
        packed = {name.removesuffix("_quantized") for name in stored if name.endswith("_quantized")}
        for name, values in stored.items():
            stem = name.removesuffix("_quantized")
            if stem != name:  # uint8, as onnxruntime's quantiser names its parts
                scale = torch.tensor(stored[f"{stem}_scale"])
                zero = torch.tensor(stored[f"{stem}_zero_point"]).float()
                yield StoredWeight((torch.tensor(values).float() - zero) * scale, stem, levels=255)
            elif values.dtype == "float32" and name.removesuffix("_scale") not in packed:
                yield StoredWeight(torch.tensor(values), name)

    def save(self, program: Any, file: Path) -> None:
        """Write the program, with weights that exceed the file's limit next to it.

        Raises:
            GymError: ``USAGE`` if no second file is allowed.
        """
        import onnx_ir

        _without_source_paths(program)
        weights = sum(value.const_value.nbytes for value in program.graph.initializers.values())
        if weights > MAX_INSIDE_BYTES and self.is_file:
            raise GymError(
                ErrorCode.USAGE,
                f"{weights / 1e9:.1f} GB of weights do not fit in one ONNX file, which is limited to 2 GiB",
                "use a folder: -o FOLDER --format onnx",
            )
        data = f"{file.name}.data" if weights > MAX_INSIDE_BYTES else None
        onnx_ir.save(program, str(file), external_data=data)


@contextmanager
def _quiet_root_logger() -> Iterator[None]:
    """Keep the quantiser's messages to the root logger from configuring logging for the whole process."""
    handler, root = logging.NullHandler(), logging.getLogger()
    root.addHandler(handler)
    try:
        yield
    finally:
        root.removeHandler(handler)


def _without_source_paths(program: Any) -> None:
    """Remove from an ``onnx_ir.Model`` the source lines and paths of this machine."""
    for graph in (program.graph, *program.functions.values()):
        for node in graph.all_nodes():
            node.doc_string = None
            for key in [key for key in node.metadata_props if key.endswith("stack_trace")]:
                del node.metadata_props[key]


def _int8() -> Any:
    """Return a pass that stores the weights of matrix products in 8 bits, with one scale per output channel.

    Inputs are quantised at run time. Weights are unsigned: signed ones overflow 16-bit sums on processors without VNNI.
    """
    from onnxruntime.quantization import QuantType
    from transformers.exporters import OnnxRuntimeDynamicConfig, OnnxRuntimeQuantizer

    config = OnnxRuntimeDynamicConfig(
        op_types_to_quantize=["MatMul", "Gemm"], per_channel=True, weight_type=QuantType.QUInt8
    )
    return OnnxRuntimeQuantizer(config)
