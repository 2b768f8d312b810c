"""Settings of the command line that are LLaMA-Factory's keys: beside one of its files, or all that there is."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from gym_fed.config.llamafactory.translate import translate
from gym_fed.config.llamafactory.translation import is_llamafactory
from gym_fed.config.train.training import TrainingConfig
from gym_fed.config.yaml.file import parse_overrides, place_overrides, validate
from gym_fed.core.errors import ErrorCode, GymError


def config_of_settings(
    settings: Sequence[str], *, ignore_unsupported: bool = False, processes: int | None = None
) -> tuple[TrainingConfig, list[str]]:
    """The config that settings alone make, with our keys or all with LLaMA-Factory's.

    Args:
        settings: ``a.b=value``.
        ignore_unsupported: See ``load_training_config``.
        processes: See ``load_training_config``.

    Raises:
        GymError: As ``load_training_config``.
    """
    values: dict[str, Any] = {}
    placed = place_overrides(values, settings)
    if not is_llamafactory(values):
        return validate(values, TrainingConfig, "--set", None, placed | {()}), []
    done = translate(values, processes)
    lost = [f"--set: {key}: no counterpart: {why}" for key, why in done.lost.items()]
    if lost and not ignore_unsupported:
        hint = "leave them out, or pass --ignore-unsupported to train without them"
        raise GymError(ErrorCode.CONFIG_INVALID, "\n".join(lost), hint)
    notes = [f"{key}: {text}" for key, text in done.notes.items()]
    return validate(done.values, TrainingConfig, "--set", None, {()}), [*lost, *notes]


def with_their_keys(given: dict[str, Any], settings: Sequence[str]) -> list[str]:
    """Put settings of LLaMA-Factory's own keys into the values of its file; those of ours are handed back."""
    ours = []
    for setting in settings:
        ((path, value),) = parse_overrides([setting])
        if len(path) > 1 or path[0] in TrainingConfig.model_fields:
            ours.append(setting)
        else:
            given[str(path[0])] = value
    return ours
