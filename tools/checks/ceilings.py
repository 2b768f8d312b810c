"""What is left of older days, file by file: a count that may only fall.

``tools/checks/ceilings.toml`` holds it. A rule without an entry there holds without exception.
"""

from __future__ import annotations

import tomllib
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

from tools.checks.files import Finding

FILE = "tools/checks/ceilings.toml"
HEAD = """\
# What is left of older days: findings by rule and file.
# `python -m tools.checks --lower` writes it, and never raises a count.
"""

Counts = dict[str, dict[str, int]]


def read(root: Path) -> Counts:
    """The ceilings, by rule and file; none without the file."""
    file = root / FILE
    return tomllib.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}


def counted(findings: Iterable[Finding]) -> Counts:
    """Findings a rule and file."""
    counts: Counts = {}
    for (rule, file), count in sorted(Counter((f.rule, f.file) for f in findings).items()):
        counts.setdefault(rule, {})[file] = count
    return counts


def above(findings: list[Finding], ceilings: Counts) -> list[Finding]:
    """All findings of those files that have more of them than their ceiling."""
    now = counted(findings)
    return [f for f in findings if now[f.rule][f.file] > ceilings.get(f.rule, {}).get(f.file, 0)]


def lowered(findings: list[Finding], ceilings: Counts) -> Counts:
    """The ceilings as they may be now: nowhere higher than before, and nothing that is not needed."""
    now = counted(findings)
    kept: Counts = {}
    for rule, files in ceilings.items():
        for file, ceiling in files.items():
            if count := min(ceiling, now.get(rule, {}).get(file, 0)):
                kept.setdefault(rule, {})[file] = count
    return kept


def write(root: Path, ceilings: Counts) -> None:
    """Replace the file, or remove it where nothing is left."""
    text = HEAD
    for rule, files in ceilings.items():
        text += f"\n[{rule}]\n" + "".join(f'"{file}" = {count}\n' for file, count in sorted(files.items()))
    if ceilings:
        (root / FILE).write_text(text, encoding="utf-8")
    else:
        (root / FILE).unlink(missing_ok=True)
