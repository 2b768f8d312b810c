"""Torch and the native kernels, imported when something is first computed with them.

What is true of a rule is an attribute of its class, and a config is checked by it. A command that merges nothing, such
as `gym-server rewards`, then has not to load torch, which takes seconds. A rule of another package may import torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch as torch
    from gym_quant import kernels as kernels
else:
    from gym_fed.core.lazy import lazy_module

    torch, kernels = lazy_module("torch"), lazy_module("gym_quant.kernels")
