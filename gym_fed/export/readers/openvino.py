"""Reads OpenVINO programs with OpenVINO's own runtime."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from gym_fed.export.readers.program import ProgramExport, alone
from gym_fed.export.readers.reading import LoadedExport


def load(parts: dict[str, Any]) -> LoadedExport:
    """Load the program ``parts["program"]`` with the tokenizer of ``parts["model"]``."""
    return alone(OpenVinoExport(Path(parts["program"]), Path(parts["model"])))


class OpenVinoExport(ProgramExport):
    """A program on the CPU in float32, with as many threads as torch has. The runtime alone sends no telemetry."""

    def __init__(self, program: Path, folder: Path) -> None:
        import openvino
        import torch

        super().__init__(folder)
        how = {"INFERENCE_PRECISION_HINT": "f32", "INFERENCE_NUM_THREADS": torch.get_num_threads()}
        self._compiled = openvino.Core().compile_model(str(program), "CPU", how)

    def run(self, ids: Any, mask: Any) -> Any:
        return self._compiled({"input_ids": ids, "attention_mask": mask})["logits"]
