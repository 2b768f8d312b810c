"""OpenVINO's representation, for Intel's runtime: token ids to logits."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from gym_fed.export.formats._program import ProgramFormat, any_shape, example_inputs
from gym_fed.export.formats.base import Options, Tolerance

_TELEMETRY = "openvino_telemetry"


class OpenVino(ProgramFormat):
    """A folder of ``openvino_model.xml`` and ``openvino_model.bin``, the names that OpenVINO's own tools expect."""

    name = "openvino"
    program = "openvino_model.xml"
    requires = ("openvino",)
    install = "pip install openvino==2026.4.1"
    reader = "openvino"
    tolerance = Tolerance(max=1e-3)
    tried = "Qwen3, where openvino is installed"
    untried = "Llama, Mistral, Gemma"

    def write_program(self, model: Any, file: Path, options: Options) -> None:
        options.report("recording the forward pass", 0, 0)
        with without_telemetry():
            from transformers.exporters import OpenVINOConfig
            from transformers.exporters.exporter_openvino import OpenVINOExporter

            config = OpenVINOConfig(
                dynamic=True,
                dynamic_shapes=any_shape(),
                prefer_deferred_runtime_asserts_over_guards=True,
                stateful=False,
            )
            program, _ = OpenVINOExporter().export_program(model, example_inputs(), config)
            options.report("writing the program", 0, 0)
            OpenVINOExporter.save_program(program, file)


@contextmanager
def without_telemetry() -> Iterator[None]:
    """Hide OpenVINO's telemetry package within the block, so that nothing is reported."""
    before = sys.modules.get(_TELEMETRY)
    sys.modules[_TELEMETRY] = None  # type: ignore[assignment]
    try:
        yield
    finally:
        if before is None:
            del sys.modules[_TELEMETRY]
        else:
            sys.modules[_TELEMETRY] = before
