"""Negative preference optimisation: an answer to forget is a rejected one, without a chosen one beside it.

``L = -2 / beta * E[log sigmoid(-beta * log(pi / pi_ref))] + retain_weight * L_retain``. Zhang et al. 2024, "Negative
Preference Optimization: From Catastrophic Collapse to Effective Unlearning", equation 3, with the retain term of its
section 4.
"""

from __future__ import annotations

from typing import Any

from gym_fed.training.algorithms.unlearning._forget_and_retain import Unlearning as _Unlearning


class Npo(_Unlearning):
    """Own loss over TRL's ``SFTTrainer``; the reference is the model at the start, whose figures are taken once."""

    tried = "full, LoRA; two processes"

    uses_reference = True
    scores_reference_once = True

    def trainer(self, settings: Any) -> tuple[type, dict[str, Any]]:
        from gym_fed.training.algorithms.unlearning._trainer import NpoTrainer

        return NpoTrainer, settings.model_dump()
