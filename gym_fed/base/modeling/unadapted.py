"""Find linear layers that get no adapter by default: routers, shared layers, and weights that mixers read directly."""

from __future__ import annotations

import inspect
import re
from collections import Counter
from contextlib import suppress
from functools import cache
from typing import Any

_NAMES = frozenset(("router", "router_gate", "shared_expert_gate"))
_CLASS = re.compile(r"Router$|(TopK|MoE|Moe)\w*Gat(e|ing)$")
_GROUPED = "GroupedLinear"
"""Ending of the class of a layer that multiplies each group of inputs by its own block (DeepSeek V4)."""
_READ_WEIGHT = re.compile(r"self\.(\w+)\.weight\b(?!\.(?:device|dtype))")


def unadapted_names(model: Any) -> list[str]:
    """Return the names of such layers for PEFT's ``exclude_modules``, which matches suffixes.

    Names are as short as possible: ``router`` if the layer itself is one, ``router.gate`` if it is part of one, and
    the full name if another linear layer's name ends in the same way.

    A trained router would send tokens to experts that were not trained for them. Some classes (Llama 4, Phi-MoE) also
    return a tuple, which an adapter cannot add to. Routers that are not linear layers (Mixtral, Qwen3-MoE) are not
    included. The mixers of Mamba and of hybrids pass the weights of some projections to a kernel, or multiply by them
    without calling the layer: an adapter on it would have no effect. A mixer is recognised by its parameter ``A_log``.
    A grouped layer takes different shapes than PEFT's. Layers that share a weight (Zamba) would each get an adapter,
    which cannot all be merged into it.
    """
    from torch import nn

    modules = dict(model.named_modules())
    linear = [module for module in modules.values() if isinstance(module, nn.Linear)]
    shared = Counter(id(module.weight) for module in linear)
    ends: dict[str, str] = {}
    others: list[str] = []
    for name, module in modules.items():
        if not isinstance(module, nn.Linear):
            continue
        path, _, last = name.rpartition(".")
        parent = path.rpartition(".")[2]
        kind, holder = type(module).__name__, modules[path]
        is_read = hasattr(holder, "A_log") and last in _weights_read(holder.__class__)
        if shared[id(module.weight)] > 1:
            ends[name] = name
        elif last in _NAMES or _CLASS.search(kind) or kind.endswith(_GROUPED) or is_read:
            ends[name] = last
        elif path and (parent == "router" or _CLASS.search(type(holder).__name__)):
            ends[name] = f"{parent}.{last}"
        else:
            others.append(f".{name}")
    return sorted({name if any(o.endswith(f".{end}") for o in others) else end for name, end in ends.items()})


@cache
def _weights_read(mixer: type) -> frozenset[str]:
    """Return the layers whose weights the methods of a mixer's class read; none if its source is not available."""
    from torch import nn

    names: set[str] = set()
    for name, method in inspect.getmembers(mixer, inspect.isfunction):
        if method is not getattr(nn.Module, name, None):
            with suppress(OSError, TypeError):
                names.update(_READ_WEIGHT.findall(inspect.getsource(method)))
    return frozenset(names)
