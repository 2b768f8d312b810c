"""Losses of ``sft`` beside the plain one: DFT is TRL's own, EAFT is this page."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from gym_fed.config.train.training import TrainingConfig
from gym_fed.data.row_counts import IGNORED
from gym_fed.errors import ErrorCode, GymError

if TYPE_CHECKING:
    from torch import Tensor

_TOP = 20
"""So many of the likeliest tokens stand for the whole distribution, as in the paper."""


def check_token_loss(config: TrainingConfig) -> None:
    """Refuse another loss than the plain one where it would not be computed.

    Raises:
        GymError: ``CONFIG_INVALID``.
    """
    if config.sft is None or not (key := _changed(config)):
        return
    others = {"privacy": config.privacy, "mixture_of_depths": config.mixture_of_depths, "liger": config.liger}
    for name, value in others.items():
        if value:
            raise GymError(
                ErrorCode.CONFIG_INVALID,
                f"sft.{key}: {name} has a loss of its own",
                f"remove sft.{key}, or {name}",
            )


def require_plain_loss(config: TrainingConfig) -> None:
    """Refuse another loss than the plain one of a model that reads images.

    Raises:
        GymError: ``CONFIG_INVALID``.
    """
    if config.sft is not None and (key := _changed(config)):
        raise GymError(
            ErrorCode.CONFIG_INVALID, f"sft.{key}: models that read images learn by nll", f"remove sft.{key}"
        )


def loss_arguments(config: TrainingConfig) -> tuple[dict[str, Any], Callable[..., Any] | None]:
    """Keyword arguments of ``trl.SFTConfig``, and the ``compute_loss_func`` of its trainer."""
    settings = config.sft
    if settings is None:
        return {}, None
    if settings.loss_type == "eaft":
        return {}, partial(entropy_adaptive_loss, alpha=settings.eaft_alpha)
    return {"loss_type": settings.loss_type, "label_smoothing_factor": settings.label_smoothing}, None


def entropy_adaptive_loss(
    outputs: Any, labels: Tensor, num_items_in_batch: Any = None, *, alpha: float = 1.0
) -> Tensor:
    """``- sum_t (H_t / ln K)^alpha log p(y_t)`` over the labelled tokens, divided by their number.

    ``H_t`` is the entropy of the ``K = 20`` likeliest tokens, renormalised, without a gradient: where the model is sure
    and the label contradicts it, little is learned. Diao et al. 2026, "Entropy-Adaptive Fine-Tuning".

    Args:
        outputs: Of the model, with ``logits`` ``[n, t, v]``.
        labels: ``[n, t]``; -100 is not learned.
        num_items_in_batch: Labelled tokens of the whole step; by default those at hand.
        alpha: Power of the weight.
    """
    import torch
    from torch.nn.functional import cross_entropy

    logits, targets = outputs.logits[:, :-1].float(), labels[:, 1:].to(outputs.logits.device)
    with torch.no_grad():
        count = min(_TOP, logits.shape[-1])
        top = logits.topk(count).values.log_softmax(-1)
        weights = (-(top.exp() * top).sum(-1) / math.log(count)).clamp(min=0) ** alpha
    losses = cross_entropy(logits.transpose(1, 2), targets, ignore_index=IGNORED, reduction="none")
    number = (targets != IGNORED).sum().clamp(min=1) if num_items_in_batch is None else num_items_in_batch
    loss: Tensor = (losses * weights).sum() / number
    return loss


def _changed(config: TrainingConfig) -> str | None:
    assert config.sft is not None
    if config.sft.loss_type != "nll":
        return "loss_type"
    return "label_smoothing" if config.sft.label_smoothing else None
