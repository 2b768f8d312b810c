"""Gradient difference: up the loss of what is to be forgotten, down the loss of what is to be kept.

``L = retain_weight * L_retain - L_forget``. Liu et al. 2022, "Continual Learning and Private Unlearning", section 4;
the name is that of Maini et al. 2024 (TOFU), section 4.
"""

from __future__ import annotations

from typing import Any

from gym_fed.training.algorithms.unlearning._forget_and_retain import Unlearning as _Unlearning


class GradientDifference(_Unlearning):
    """Own loss over TRL's ``SFTTrainer``."""

    tried = "full, LoRA; two processes"

    def trainer(self, settings: Any) -> tuple[type, dict[str, Any]]:
        from gym_fed.training.algorithms.unlearning._trainer import GradientDifferenceTrainer

        return GradientDifferenceTrainer, settings.model_dump()
