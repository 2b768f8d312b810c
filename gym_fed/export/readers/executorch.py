"""Reads ExecuTorch programs with ExecuTorch's own runtime."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from gym_fed.export.readers.program import ProgramExport, alone
from gym_fed.export.readers.reading import LoadedExport


def load(parts: dict[str, Any]) -> LoadedExport:
    """Load the program ``parts["program"]`` with the tokenizer of ``parts["model"]``."""
    return alone(ExecuTorchExport(Path(parts["program"]), Path(parts["model"])))


class ExecuTorchExport(ProgramExport):
    """A program in ExecuTorch's own threads, one text at a time."""

    rows = 1

    def __init__(self, program: Path, folder: Path) -> None:
        from executorch.runtime import Runtime

        super().__init__(folder)
        self._forward = Runtime.get().load_program(program).load_method("forward")

    def run(self, ids: Any, mask: Any) -> Any:
        import torch

        return self._forward.execute([torch.from_numpy(ids), torch.from_numpy(mask)])[0].numpy()
