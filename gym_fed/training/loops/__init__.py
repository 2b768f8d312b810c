"""Training loops for recipes: `SFT`, `DPO`, `PPO` and `GRPO` on `StringThread`s and spawned models.

A loop is a run of `gym train` with a recipe's arguments: it has the losses, rollouts, resume and checks of the
algorithm of the same name.

- ``base``: conversations as text (``StringThread``), and the base classes of loops.
- ``loops``: one class per algorithm.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from gym_fed.core.lazy import lazy

if TYPE_CHECKING:
    from gym_fed.training.loops.base import StringThread as StringThread
    from gym_fed.training.loops.loops import DPO as DPO
    from gym_fed.training.loops.loops import GRPO as GRPO
    from gym_fed.training.loops.loops import PPO as PPO
    from gym_fed.training.loops.loops import SFT as SFT

__all__, __getattr__ = lazy(__name__)
