"""Write the table of docs/support.md from the results."""

from __future__ import annotations

import json
import re
from pathlib import Path

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
KINDS = {"works": "works", "refused": "refused", "not tried": "not tried", "FAULT": "fault"}
"""Prefixes of results, and the words for them on the page."""
_READS = {"text": "Text", "image": "Images and text", "sound": "Audio and text"}
_MAX_REASON = 110
_QUOTED = re.compile(r"'[\w./-]+'|\[[\d, ]*\]")
_STORED = re.compile(r"variants/objects/\S+ ")
_CLASS = re.compile(
    r"\b(?!RoPE|LoRA)x?[A-Z][A-Za-z0-9_]*(?:[a-z][A-Za-z0-9_]*[A-Z]|[A-Z][A-Za-z0-9_]*[a-z])[A-Za-z0-9_]*\b"
)
_TYPE = re.compile(r"(is an? |not read |transformers reads |of type )\w+")


def results_of(path: Path) -> dict[str, dict[str, str]]:
    """Return the cells of every class from a file of results; a later cell replaces an earlier one."""
    cells: dict[str, dict[str, str]] = {}
    if path.is_file():
        for line in path.read_text(encoding="utf-8").splitlines():
            record = json.loads(line)
            cells.setdefault(record["class"], {}).update(record["cells"])
    return cells


def drop_torn_line(path: Path) -> None:
    """Remove the last line of a file of results if it is incomplete because a check was stopped while writing it."""
    if path.is_file() and (text := path.read_bytes()) and not text.endswith(b"\n"):
        path.write_bytes(text[: text.rfind(b"\n") + 1])


def write_page(results: Path, architectures: list[Architecture]) -> None:
    """Replace the table on the page; cells without a new result stay."""
    before, rest = PAGE.read_text(encoding="utf-8").split(BEGIN)
    old, after = rest.split(END)
    cells = page_cells(old)
    for name, found in results_of(results).items():
        cells.setdefault(name, {}).update(found)
    text = table(cells, architectures)
    PAGE.write_text(f"{before}{BEGIN}\n{text}\n{END}{after}", encoding="utf-8")


def page_cells(text: str) -> dict[str, dict[str, str]]:
    """Return the results of every class in the text of the page, with their reasons, as ``results_of`` does."""
    reasons = dict(re.findall(r"^ *(\d+) (.+)$", text, re.MULTILINE))
    words = {word: kind for kind, word in KINDS.items()}
    cells: dict[str, dict[str, str]] = {}
    for name, row in re.findall(r"^\| `(\w+)` \| (.*) \|$", text, re.MULTILINE):
        for column, cell in zip(HEADS, row.split(" | "), strict=True):
            word = cell.rstrip("0123456789 ")
            reason = reasons.get(cell[len(word) :].strip())
            cells.setdefault(name, {})[column] = words[word] + (f" ({reason})" if reason else "")
    return cells


def page_kinds(name: str) -> dict[str, str]:
    """Return the page's word for the result of each column for a class; empty for a class that is not on the page."""
    row = re.search(rf"^\| `{name}` \| (.*) \|$", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    return (
        {}
        if row is None
        else dict(zip(HEADS, (cell.strip("0123456789 ") for cell in row[1].split("|")), strict=True))
    )


def kind_of(text: str) -> str:
    """Return the page's word for a result; an empty result was not tried.

    Raises:
        ValueError: If the text does not begin with a kind of result.
    """
    for kind, word in KINDS.items():
        if text.startswith(kind):
            return word
    if text:
        raise ValueError(f"{text!r} begins with none of {', '.join(KINDS)}")
    return "not tried"


def table(results: dict[str, dict[str, str]], architectures: list[Architecture]) -> str:
    """Return the totals, a table for each kind of input, and the reasons of the cells other than ``works``."""
    import transformers

    reasons: dict[str, int] = {}
    parts = [f"Made with transformers {transformers.__version__}. {_totals(results, architectures)}"]
    for reads, heading in _READS.items():
        rows = [
            _row(each, results.get(each.name, {}), reasons) for each in architectures if each.reads == reads
        ]
        head = f"| {heading} | {' | '.join(HEADS.values())} |\n|{'---|' * (len(HEADS) + 1)}"
        parts.append("\n".join([head, *rows]))
    listed = "\n".join(f"{number:3} {reason}" for reason, number in reasons.items())
    return "\n\n".join([*parts, f"The reasons by number:\n\n```text\n{listed}\n```"]) + "\n"


def _totals(results: dict[str, dict[str, str]], architectures: list[Architecture]) -> str:
    cells = [results.get(each.name, {}) for each in architectures]

    def count(column: str) -> int:
        return sum(kind_of(row.get(column, "")) == "works" for row in cells)

    faults = sum(kind_of(text) == "fault" for row in cells for text in row.values())
    return (
        f"Of {len(architectures)} classes {count('load')} load, {count('full')} train with all weights, and "
        f"{count('lora')} with LoRA. The API serves {count('api')}: {count('api of lora')} with LoRA deltas, and "
        f"{count('api of full')} with deltas of all weights. Faults: {counted(faults, 'cell')}."
    )


def _row(architecture: Architecture, cells: dict[str, str], reasons: dict[str, int]) -> str:
    return f"| `{architecture.name}` | {' | '.join(_cell(cells.get(c, ''), reasons) for c in HEADS)} |"


def _cell(text: str, reasons: dict[str, int]) -> str:
    """Return a cell: the word for the result, and the number of its reason."""
    kind = kind_of(text)
    reason = text.partition("(")[2].removesuffix(")")
    if kind == "works" or not reason:
        return kind
    return f"{kind} {reasons.setdefault(_general(reason), len(reasons) + 1)}"


def _general(reason: str) -> str:
    """Return a reason without the names that differ from class to class."""
    for pattern, general in ((_STORED, ""), (_QUOTED, "NAME"), (_CLASS, "CLASS"), (_TYPE, r"\1TYPE")):
        reason = pattern.sub(general, reason)
    return " ".join(reason.replace("base: ", "").split())[:_MAX_REASON]
