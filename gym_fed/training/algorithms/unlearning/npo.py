"""Negative preference optimisation (NPO): rows to forget are rejected answers without a chosen counterpart.

``L = -2 / beta * E[log sigmoid(-beta * log(pi / pi_ref))] + retain_weight * L_retain``; ``npo_loss`` is the first term,
``L_retain`` the next-token loss. Zhang et al. 2024, "Negative Preference Optimization: From Catastrophic Collapse to
Effective Unlearning", equation 3, with the retain term of its section 4.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from gym_fed.training.algorithms.unlearning._forget_and_retain import Unlearning as _Unlearning

if TYPE_CHECKING:
    from torch import Tensor


class Npo(_Unlearning):
    """NPO as a custom loss of TRL's ``SFTTrainer``; the reference, the untrained model, scores the rows once."""

    tried = "full, LoRA; two processes"

    uses_reference = True
    scores_reference_once = True

    def trainer(self, settings: Any) -> tuple[type, dict[str, Any]]:
        from gym_fed.training.algorithms.unlearning._trainer import ReferenceTrainer

        forget = partial(npo_loss, beta=settings.beta)
        return ReferenceTrainer, {"retain_weight": settings.retain_weight, "forget_loss": forget}


def npo_loss(log_ratios: Tensor, beta: float) -> Tensor:
    """Return ``-2 / beta * E[log sigmoid(-beta * log(pi / pi_ref))]``, Zhang et al. 2024, equation 3.

    Args:
        log_ratios: ``[n]``, the log-probability of each answer minus the reference's.
        beta: The paper's inverse temperature.
    """
    from torch.nn.functional import logsigmoid

    return -2.0 / beta * logsigmoid(-beta * log_ratios).mean()
