"""Ready loops for recipes: `SFT`, `DPO`, `PPO` and `GRPO` on `StringThread`s and on models that a context has spawned.

A loop is a run of `gym train` with its arguments in the words of a recipe: its losses, its rollouts, its resume and its
checks are those of the algorithm of the same name, and nothing of them is written a second time.

- ``string_thread``: a conversation as text, with metadata for graders.
- ``sft``, ``dpo``, ``ppo``, ``grpo``: a loop each; ``base``: what they share.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from gym_fed.core.lazy import lazy

if TYPE_CHECKING:
    from gym_fed.training.loops.dpo import DPO as DPO
    from gym_fed.training.loops.grpo import GRPO as GRPO
    from gym_fed.training.loops.ppo import PPO as PPO
    from gym_fed.training.loops.sft import SFT as SFT
    from gym_fed.training.loops.string_thread import StringThread as StringThread

__all__, __getattr__ = lazy(__name__)
