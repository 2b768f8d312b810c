"""Write the table of docs/support.md from the results."""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

from gym_fed.core.text import counted
from tools.architectures.classes import Architecture

PAGE = Path(__file__).resolve().parents[2] / "docs" / "support.md"
BEGIN, END = "<!-- by tools/architectures -->\n", "<!-- until here, by tools/architectures -->\n"
HEADS = {
    "load": "load",
    "full": "full",
    "lora": "LoRA",
    "delta": "delta",
    "variant": "variant",
    "api": "API, base",
    "api of full": "API, full delta",
    "api of lora": "API, LoRA delta",
    "eval": "eval",
    "export": "merged folder",
    "gguf": "GGUF",
}
_MARKS = {"works": "works", "refused": "refused", "not tried": "not tried", "FAULT": "fault"}
_READS = {"text": "Text", "image": "Images and text", "sound": "Sound and text"}
_MAX_REASON = 160


def results_of(path: Path) -> dict[str, dict[str, str]]:
    """Return the cells of every class in a file of results; a later cell replaces an earlier one."""
    cells: dict[str, dict[str, str]] = {}
    if path.is_file():
        for line in path.read_text(encoding="utf-8").splitlines():
            record = json.loads(line)
            cells.setdefault(record["class"], {}).update(record["cells"])
    return cells


def write_page(results: Path, architectures: list[Architecture]) -> None:
    """Replace the table of the page."""
    before, rest = PAGE.read_text(encoding="utf-8").split(BEGIN)
    _, after = rest.split(END)
    text = table(results_of(results), architectures)
    PAGE.write_text(f"{before}{BEGIN}\n{text}\n{END}{after}", encoding="utf-8")


def table(results: dict[str, dict[str, str]], architectures: list[Architecture]) -> str:
    """Return totals, a table for each kind of input, and the reasons of the cells that do not say ``works``."""
    import transformers

    parts = [f"With transformers {transformers.__version__}. {_totals(results)}"]
    reasons: dict[str, int] = {}
    for reads, heading in _READS.items():
        listed = [each for each in architectures if each.reads == reads]
        rows = [_row(each, results.get(each.name, {}), reasons) for each in listed]
        head = f"| {heading} | {' | '.join(HEADS.values())} |\n|{'---|' * (len(HEADS) + 1)}"
        parts.append("\n".join([head, *rows]))
    parts.append("\n".join(f"{number}. {reason}" for reason, number in reasons.items()))
    return "\n\n".join(parts) + "\n"


def _totals(results: dict[str, dict[str, str]]) -> str:
    def count(*columns: str) -> int:
        return sum(all(cells.get(c, "").startswith("works") for c in columns) for cells in results.values())

    faults = sum(text.startswith("FAULT") for cells in results.values() for text in cells.values())
    return (
        f"Of {counted(len(results), 'class', 'classes')}, {count('full')} train with all weights and {count('lora')} "
        f"with LoRA. {count('api')} are served, {count('api of lora')} of them with LoRA variants and "
        f"{count('api of full')} with variants of all weights. {counted(faults, 'cell')} has a fault."
    )


def _row(architecture: Architecture, cells: dict[str, str], reasons: dict[str, int]) -> str:
    return f"| `{architecture.name}` | {' | '.join(_cell(cells.get(c, ''), reasons) for c in HEADS)} |"


def _cell(text: str, reasons: dict[str, int]) -> str:
    """Return a cell: its kind, and the number of its reason."""
    kind = next((kind for kind in _MARKS if text.startswith(kind)), "not tried")
    reason = text[len(kind) :].strip().removeprefix("(").removesuffix(")")
    if kind == "works" or not reason:
        return _MARKS[kind]
    return f"{_MARKS[kind]} {reasons.setdefault(_plain(reason), len(reasons) + 1)}"


def _plain(reason: str) -> str:
    """Return a reason as one line of Markdown, without names and numbers that differ from class to class."""
    return re.sub(r"[|<>`]", "'", reason)[:_MAX_REASON]


__all__ = ["Any", "Counter"]
