"""Torch and the native kernels, imported on first use.

Properties of a rule are attributes of its class, so a config can be validated without torch. Commands that merge
nothing, such as `gym-server rewards`, then avoid its import, which takes seconds. Rules of other packages may import
torch directly.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch as torch
    from gym_quant import kernels as kernels
else:
    from gym_fed.core.lazy import lazy_module

    torch, kernels = lazy_module("torch"), lazy_module("gym_quant.kernels")
