"""Finds the routers of a mixture of experts: linear layers that choose experts and get no adapter by default."""

from __future__ import annotations

from typing import Any

_NAMES = frozenset(("router", "shared_expert_gate"))


def router_names(model: Any) -> list[str]:
    """Last names of the linear layers that are routers, such as ``router``.

    A trained router sends tokens to experts that were not trained for them. Some classes (Llama 4, Phi-MoE) also return
    a tuple, which an adapter cannot add to. Routers that are no linear layers (Mixtral, Qwen3-MoE) get no adapter
    anyway and are not listed.
    """
    from torch import nn

    found = set()
    for name, module in model.named_modules():
        last = name.rpartition(".")[2]
        if isinstance(module, nn.Linear) and (last in _NAMES or type(module).__name__.endswith("Router")):
            found.add(last)
    return sorted(found)
