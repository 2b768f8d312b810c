"""Find the routers of a mixture of experts, which are linear layers without adapters by default."""

from __future__ import annotations

import re
from typing import Any

_NAMES = frozenset(("router", "router_gate", "shared_expert_gate"))
_CLASS = re.compile(r"Router$|(TopK|MoE|Moe)\w*Gat(e|ing)$")


def router_names(model: Any) -> list[str]:
    """Return the names of router layers for PEFT's ``exclude_modules``, which matches suffixes.

    Names are as short as possible: ``router`` if the layer itself is one, ``router.gate`` if it is part of one, and
    the full name if another linear layer's name ends in the same way.

    A trained router would send tokens to experts that were not trained for them. Some classes (Llama 4, Phi-MoE) also
    return a tuple, which an adapter cannot add to. Routers that are not linear layers (Mixtral, Qwen3-MoE) are not
    included.
    """
    from torch import nn

    modules = dict(model.named_modules())
    ends: dict[str, str] = {}
    others: list[str] = []
    for name, module in modules.items():
        if not isinstance(module, nn.Linear):
            continue
        path, _, last = name.rpartition(".")
        parent = path.rpartition(".")[2]
        if last in _NAMES or _CLASS.search(type(module).__name__):
            ends[name] = last
        elif path and (parent == "router" or _CLASS.search(type(modules[path]).__name__)):
            ends[name] = f"{parent}.{last}"
        else:
            others.append(f".{name}")
    return sorted({name if any(o.endswith(f".{end}") for o in others) else end for name, end in ends.items()})
