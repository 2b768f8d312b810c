"""List the files to check, and define a finding."""

from __future__ import annotations

import subprocess
from dataclasses import dataclass
from pathlib import Path

ENDINGS = {".py", ".md", ".yaml", ".yml", ".toml", ".proto", ".c", ".cpp", ".h", ".sh"}
NAMES = {"Makefile", "run"}
NOT_OURS = {"_generated", "golden", "build", "dist", "node_modules"}
"""Folders with generated code, recorded files and build outputs."""


@dataclass(frozen=True)
class Finding:
    """A violation: its location, the rule that it breaks, and what to do instead."""

    file: str
    line: int
    message: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.message}"


def text_files(root: Path) -> dict[str, str]:
    """Return all text files of the checkout by their path from ``root``, except those that git ignores."""
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
