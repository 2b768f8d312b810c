"""Refusals that several tuning methods share."""

from __future__ import annotations

from gym_fed.config.train.training import TrainingConfig
from gym_fed.config.train.tuning import AdaLoraSettings
from gym_fed.core.errors import ErrorCode, GymError


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


def adalora_schedule(settings: AdaLoraSettings, steps: int) -> tuple[int, int]:
    """PEFT's ``tinit`` and ``tfinal`` in a run of ``steps`` optimiser steps.

    Ranks are settled at step ``steps - tfinal``, by an importance that is measured in the steps before it.

    Raises:
        GymError: ``CONFIG_INVALID`` when no step is left to measure the importance, or to lower the ranks.
    """
    first, final = int(settings.warmup_fraction * steps), int(settings.final_fraction * steps)
    if first + final >= steps or steps - final < 2:
        raise GymError(
            ErrorCode.CONFIG_INVALID,
            f"adalora: a run of {steps} optimiser {'step' if steps == 1 else 'steps'} leaves none in which ranks fall",
            "train longer, or lower adalora.warmup_fraction and final_fraction"
            if steps > 1
            else "train for two steps or more",
        )
    return first, final
