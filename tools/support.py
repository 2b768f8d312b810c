"""Writes the tables of docs/support.md from the registry; `--check` reports whether that is needed.

A row is a member of ours: the first line of its documentation, what its class says it goes with, and what the tests run
it with. Members of installed packages are left out.
"""

from __future__ import annotations

import inspect
import re
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "support.md"
BEGIN, END = "<!-- from the registry, by tools/support.py -->\n", "<!-- until here -->\n"

KEYS = {"tuning method": "finetuning", "export format": "--format"}
"""What a kind is called in a config, where its own word is another."""

FACTS = {
    "algorithm": {
        "needs_graders": "`graders`",
        "forgets": "`role: forget`",
        "packs": "`packing: bfd`",
        "per_example": "`privacy`",
        "shards": "`fsdp2`, `tensor_parallel`",
        "reads_images": "pictures",
        "federates": "federated rounds",
    },
    "tuning method": {
        "on_quantized": "`quantization`",
        "per_example": "`privacy`",
        "federates": "federated rounds",
    },
    "optimizer": {"shards": "`fsdp2`, `tensor_parallel`", "per_example": "`privacy`"},
    "feature": {"per_example": "`privacy`"},
}
"""Attributes of a member, and what it goes with where they are true."""


def tables() -> str:
    """All kinds, a table each."""
    from gym_fed.core.registries import ALL

    return "\n".join(_table(kind) for kind in ALL)


def page() -> str:
    """The page as it should be."""
    text = PAGE.read_text(encoding="utf-8")
    before, rest = text.split(BEGIN)
    _, after = rest.split(END)
    return f"{before}{BEGIN}\n{tables()}\n{END}{after}"


def _table(kind: Any) -> str:
    rows = [_row(kind, name) for name in kind.own()]
    used = [column for column in rows[0] if any(row[column] for row in rows)]
    head = [f"`{KEYS.get(kind.kind, kind.kind)}`" if column == "name" else column for column in used]
    lines = [head, ["---"] * len(head), *([row[column] for column in used] for row in rows)]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in lines)


def _row(kind: Any, name: str) -> dict[str, str]:
    member = kind.new(name) if hasattr(kind, "table") else kind.type_of(name)
    facts = FACTS.get(kind.kind, {})
    return {
        "name": f"`{name}`",
        "what it is": _first_line(member),
        "rows": getattr(member, "row_kind", ""),
        "goes with": ", ".join(words for fact, words in facts.items() if getattr(member, fact)),
        "runs on": _where(member) if kind.kind == "optimizer" else "",
        "tried on a CPU": getattr(member, "tried", ""),
        "not tried": getattr(member, "untried", ""),
    }


def _where(optimizer: Any) -> str:
    return f"CUDA: {optimizer.gpu}" if getattr(optimizer, "gpu", "") else "anywhere"


def _first_line(member: Any) -> str:
    """Of a class its module's first line; of a line of a table its own words, or what it is made of."""
    if not isinstance(member, type) and type(member).__module__.rpartition(".")[2].startswith("_"):
        words: str = getattr(member, "summary", "") or f"`{member.source.replace(':', '.')}`"
        return words.replace("|", "\\|")
    module = inspect.getmodule(member if isinstance(member, type) else type(member))
    assert module is not None
    assert module.__doc__ is not None, module
    return re.sub(r"``(.+?)``", r"`\1`", " ".join(module.__doc__.split("\n\n")[0].split())).replace(
        "|", "\\|"
    )


if __name__ == "__main__":
    wanted = page()
    if "--check" in sys.argv:
        sys.exit(PAGE.read_text(encoding="utf-8") != wanted)
    PAGE.write_text(wanted, encoding="utf-8")
