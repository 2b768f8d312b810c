"""The files of our packages, for tests that read the source: generated code and what a test names left out."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]


@cache
def parsed(file: Path) -> ast.Module:
    """Parse a file of the checkout; the many tests that read all of them in a process parse each of them once."""
    return ast.parse(file.read_text(encoding="utf-8"), str(file))


def our_files(without: Path) -> list[Path]:
    """Every Python file of the packages that is not below ``without``."""
    files = [
        file
        for folder in ("gym_fed", "server", "client", "quant")
        for file in sorted((ROOT / folder).rglob("*.py"))
        if without not in file.parents and "_generated" not in file.parts
    ]
    assert len(files) > 400
    return files
