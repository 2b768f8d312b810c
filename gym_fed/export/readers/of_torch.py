"""Programs of ``torch.export`` and ``torch.jit``, by torch alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from gym_fed.export.readers.of_program import OfProgram, alone
from gym_fed.export.readers.reading import LoadedExport

LIBRARIES = ("torch", "torch.export", "tokenizers")
"""What the process that reads back imports before it knows its job."""


def load(parts: dict[str, Any]) -> LoadedExport:
    """The program ``parts["program"]`` with the tokenizer of ``parts["model"]``."""
    return alone(OfTorch(Path(parts["program"]), Path(parts["model"])))


class OfTorch(OfProgram):
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
            found = self._forward(input_ids=torch.from_numpy(ids), attention_mask=torch.from_numpy(mask))
        return found["logits"].numpy()
