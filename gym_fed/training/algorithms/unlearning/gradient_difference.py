"""Gradient difference: raise the loss on rows to forget, lower the loss on rows to retain.

``L = retain_weight * L_retain - L_forget``, where ``-L_forget`` is ``gradient_ascent_loss`` and ``L_retain`` the
next-token loss. Liu et al. 2022, "Continual Learning and Private Unlearning", section 4; named by Maini et al. 2024
(TOFU), section 4.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from gym_fed.training.algorithms.unlearning._forget_and_retain import Unlearning as _Unlearning

if TYPE_CHECKING:
    from torch import Tensor


class GradientDifference(_Unlearning):
    """Gradient difference as a custom loss of TRL's ``SFTTrainer``."""

    tried = "full, LoRA; two processes"

    def trainer(self, settings: Any) -> tuple[type, dict[str, Any]]:
        from gym_fed.training.algorithms.unlearning._trainer import UnlearningTrainer

        ascent = partial(gradient_ascent_loss, cap=settings.forget_loss_cap)
        return UnlearningTrainer, {"retain_weight": settings.retain_weight, "forget_loss": ascent}


def gradient_ascent_loss(log_probs: Tensor, labelled: Tensor, cap: float | None) -> Tensor:
    """Return ``-L_forget`` of Liu et al. 2022, section 4, a mean over tokens.

    Args:
        log_probs: ``[n, t]`` float32, 0 for unlabelled tokens.
        labelled: ``[n, t]`` bool.
        cap: Loss in nats per token above which a row has no gradient and counts as ``cap``; None for no cap.
    """
    counts = labelled.sum(dim=1)
    rows = -log_probs.sum(dim=1) / counts.clamp(min=1)
    if cap is not None:
        rows = rows.clamp(max=cap)
    return -(rows * counts).sum() / counts.sum().clamp(min=1)
