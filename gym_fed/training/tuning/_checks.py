"""Refusals that several tuning methods share."""

from __future__ import annotations

from gym_fed.config.train.training import TrainingConfig
from gym_fed.errors import ErrorCode, GymError


def refuse_quantization(config: TrainingConfig, why: str) -> None:
    """Refuse the ``quantization`` section.

    Raises:
        GymError: ``CONFIG_INVALID``.
    """
    if config.quantization is not None:
        raise GymError(
            ErrorCode.CONFIG_INVALID,
            f"quantization: finetuning {config.finetuning} cannot use it: {why}",
            "remove the section, or train with finetuning: lora",
        )
