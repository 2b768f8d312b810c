"""Reads ONNX programs with onnxruntime only."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from gym_fed.export.readers.program import ProgramExport, alone
from gym_fed.export.readers.reading import LoadedExport

LIBRARIES = ("torch", "onnxruntime", "tokenizers")
"""Libraries that the reading process imports before its job arrives."""


def load(parts: dict[str, Any]) -> LoadedExport:
    """Load the program ``parts["program"]`` with the tokenizer of ``parts["model"]``."""
    return alone(OnnxExport(Path(parts["program"]), Path(parts["model"])))


class OnnxExport(ProgramExport):
    """A program on the CPU, with as many threads as torch has."""

    def __init__(self, program: Path, folder: Path) -> None:
        import onnxruntime
        import torch

        super().__init__(folder)
        onnxruntime.disable_telemetry_events()
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = torch.get_num_threads()
        self._session = onnxruntime.InferenceSession(program, options, providers=["CPUExecutionProvider"])

    def run(self, ids: Any, mask: Any) -> Any:
        return self._session.run(["logits"], {"input_ids": ids, "attention_mask": mask})[0]
