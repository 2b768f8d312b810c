"""Runs by LLaMA-Factory's names: one of our configs, or its five groups of arguments."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from gym_fed.config.train.training import TrainingConfig
from gym_fed.config.training_file import load_training_config
from gym_fed.core.aliases import note
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.interop.arguments import Arguments, training_config
from gym_fed.training.run.result import TrainResult

__all__ = ["run_sft"]


def run_sft(
    config: TrainingConfig | str | Path | Mapping[str, Any] | Arguments,
    *groups: Arguments | None,
    callbacks: Sequence[Any] | None = None,
) -> TrainResult:
    """Supervised fine-tuning.

    Args:
        config: A config, the path of its YAML file, LLaMA-Factory's keys, or the first of its five groups.
        groups: The other four.
        callbacks: None but an empty list: code that looks on is given to ``Trainer`` as ``on_step`` or ``on_report``.

    Raises:
        GymError: ``USAGE`` for another algorithm or for callbacks; see ``Trainer.train``.
    """
    if callbacks:
        raise GymError(
            ErrorCode.USAGE,
            "transformers callbacks are not supported",
            "pass on_step or on_report to gym_fed.Trainer",
        )
    settings = _config(config, groups)
    if settings.algorithm != "sft":
        raise GymError(
            ErrorCode.USAGE,
            f"run_sft: the config's algorithm is {settings.algorithm}",
            "use Trainer(config).train()",
        )
    return _run(settings)


def _config(first: Any, groups: Sequence[Arguments | None]) -> TrainingConfig:
    if isinstance(first, TrainingConfig):
        return first
    if isinstance(first, str | Path):
        return load_training_config(first)[0]
    if isinstance(first, Mapping):
        return training_config(first)
    given = [group for group in (first, *groups) if group is not None]
    return training_config({key: value for group in given for key, value in group.given.items()})


def _run(config: TrainingConfig) -> TrainResult:
    from gym_fed.training.trainer import Trainer

    note("run_sft", "`Trainer(config).train()`")
    return Trainer(config).train()
