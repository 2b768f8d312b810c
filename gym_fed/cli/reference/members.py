"""The reference of all names in configs, from the registries: `gym docs members`."""

from __future__ import annotations

import inspect
from typing import Any

from gym_fed.cli.reference._markdown import cell
from gym_fed.core.registries import ALL

KEYS = {"tuning method": "finetuning", "export format": "--format"}
"""The key of a kind in a config or command, where it differs from the kind's name."""

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
"""By kind: a boolean attribute of its members, and the key or feature that works where it is true."""

_INTRODUCTION = """\
# Every name that a config may hold

What each name is, what it goes with, and what the tests ran it with, on a CPU and tiny models. Names that an installed
package adds are not listed. Hardware and libraries: [what runs where](support.md).
"""


def page() -> str:
    """A table for each kind."""
    return "\n".join([_INTRODUCTION, *(_table(kind) for kind in ALL)])


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
    """Return the first line of the member's module; for an entry of a table its summary or its class."""
    if not isinstance(member, type) and type(member).__module__.rpartition(".")[2].startswith("_"):
        return cell(getattr(member, "summary", "") or f"`{member.source.replace(':', '.')}`")
    module = inspect.getmodule(member if isinstance(member, type) else type(member))
    return cell(" ".join((getattr(module, "__doc__", None) or "").split("\n\n")[0].split()))
