"""A TorchScript trace of token ids to logits, with the tokenizer. Deprecated in torch: see torch_export."""

from __future__ import annotations

import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from gym_fed.export.formats._program import ProgramFormat, archive_file, example_inputs
from gym_fed.export.formats.base import Options
from gym_fed.export.program_weights import StoredWeight

_DEBUG = ".debug_pkl"
"""Records that contain source paths of this machine; torch does not need them to read a program."""
_VERSIONS = (".data/version", "version")
"""The record of the operators' version, in new and in old archives."""
_OWN = ("version", "byteorder", ".data/")
"""Records that torch's writer adds itself."""


class TorchScript(ProgramFormat):
    """A folder with ``model.pt``, which only torch reads."""

    name = "torchscript"
    program = "model.pt"
    suffix = ".pt"
    reader = "torch"
    reader_libraries = ("torch.export",)
    tried = "Qwen3, Llama, Mistral, Gemma, a mixture of experts; sliding windows"
    untried = "models larger than gym-nano"

    def write_program(self, model: Any, file: Path, options: Options) -> None:
        import torch

        with torch.inference_mode():
            program: Any = torch.jit.trace(  # type: ignore[no-untyped-call]
                model, example_kwarg_inputs=example_inputs(), check_trace=False, strict=False
            )
        data = io.BytesIO()
        torch.jit.save(program, data)
        data.seek(0)
        _write_without_debug(data, file)

    def weights(self, file: Path) -> Iterator[StoredWeight]:
        import torch

        program: Any = torch.jit.load(file)  # type: ignore[no-untyped-call]
        for name, values in program.state_dict().items():
            if values.is_floating_point():
                yield StoredWeight(values.detach(), name)


def _write_without_debug(data: io.BytesIO, file: Path) -> None:
    """Write the archive ``data`` without its ``_DEBUG`` records, aligned as torch aligns it."""
    import torch

    reader = torch._C.PyTorchFileReader(data)
    version = next(int(reader.get_record(name)) for name in reader.get_all_records() if name in _VERSIONS)
    with archive_file(file) as target:
        writer = torch._C.PyTorchFileWriter(target)
        # Without it, an operator such as gelu would be read as its first version, which had fewer arguments.
        writer.set_min_version(version)
        for name in reader.get_all_records():
            if not name.endswith(_DEBUG) and not name.startswith(_OWN):
                record = reader.get_record(name)
                writer.write_record(name, record, len(record))
        writer.write_end_of_file()
