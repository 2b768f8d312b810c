"""Reads programs of ``torch.export`` and ``torch.jit`` with torch only."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from gym_fed.export.readers.program import ProgramExport, alone
from gym_fed.export.readers.reading import LoadedExport

LIBRARIES = ("torch", "torch.export", "tokenizers")
"""Libraries that the reading process imports before its job arrives."""


def load(parts: dict[str, Any]) -> LoadedExport:
    """Load the program ``parts["program"]`` with the tokenizer of ``parts["model"]``."""
    return alone(TorchExport(Path(parts["program"]), Path(parts["model"])))


class TorchExport(ProgramExport):
    """A traced or exported program."""

    def __init__(self, program: Path, folder: Path) -> None:
        import torch

        super().__init__(folder)
        if program.suffix == ".pt2":
            self._forward: Any = torch.export.load(program).module()
        else:
            self._forward = torch.jit.load(program)  # type: ignore[no-untyped-call]

    def run(self, ids: Any, mask: Any) -> Any:
        import torch

        with torch.inference_mode():
            output = self._forward(input_ids=torch.from_numpy(ids), attention_mask=torch.from_numpy(mask))
        return output["logits"].numpy()
