"""The files that are checked, and what is found in them."""

from __future__ import annotations

import subprocess
from dataclasses import dataclass
from pathlib import Path

ENDINGS = {".py", ".md", ".yaml", ".yml", ".toml", ".proto", ".c", ".cpp", ".h", ".sh"}
NAMES = {"Makefile", "run"}
NOT_OURS = {"_generated", "golden", "build", "dist", "node_modules"}
"""Folders with generated code, recorded files and what builds leave behind."""


@dataclass(frozen=True)
class Finding:
    """One violation: where it is, which rule it breaks, and what to do instead."""

    file: str
    line: int
    message: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.message}"


def text_files(root: Path) -> dict[str, str]:
    """Every file of the checkout that people write, by its path from ``root``; in a tree without git, all of them."""
    listing = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=root,
        capture_output=True,
        text=True,
    )
    if (root / ".git").exists() and listing.returncode == 0:
        names = sorted(set(filter(None, listing.stdout.split("\0"))))
    else:
        names = sorted(str(file.relative_to(root)) for file in root.rglob("*") if file.is_file())
    wanted = [
        name
        for name in map(Path, names)
        if (name.suffix in ENDINGS or name.name in NAMES) and not NOT_OURS & set(name.parts)
    ]
    return {str(n): (root / n).read_text(encoding="utf-8") for n in wanted if (root / n).is_file()}
