"""Load run configs from files with gym-fed's or another tool's keys; errors name lines of the file."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

import yaml

from gym_fed.config.parsed import Job, ParsedConfig, Translation, dialect_of, dialects
from gym_fed.config.predict import PredictConfig
from gym_fed.config.schema.base import StrictModel
from gym_fed.config.train.training import TrainingConfig
from gym_fed.config.yaml.file import load_config, parse_overrides, place_overrides, validate
from gym_fed.core.errors import ErrorCode, GymError

ConfigT = TypeVar("ConfigT", bound=StrictModel)
Source = ParsedConfig | str | Path
"""A config file's path, or a parsed file."""

_COMMANDS = {
    "predict": ("predicts", "gym predict {}"),
    "export": ("merges and exports a model", "gym export {}"),
    "inference": ("generates answers with a model", "gym chat {0}, or gym api {0}"),
}


def load_training_config(
    source: Source | None,
    overrides: Sequence[str] = (),
    *,
    ignore_unsupported: bool = False,
    processes: int | None = None,
) -> tuple[TrainingConfig, list[str]]:
    """Load the config of a training run.

    Args:
        source: YAML file with gym-fed's or a dialect's keys; None if the overrides are the complete config.
        overrides: ``a.b=value`` settings that take precedence over the file. Keys of the file's dialect are accepted
            too; without a file, all keys must be gym-fed's, or all of one dialect.
        ignore_unsupported: True to ignore keys without a counterpart; the notes list them.
        processes: Number of processes of the run; None if unknown.

    Returns:
        Config, and a line for every omitted key of a dialect.

    Raises:
        GymError: ``CONFIG_INVALID`` listing every problem, one per line; see ``load_config`` for other errors.
    """
    if source is None:
        return _from_overrides(overrides, ignore_unsupported=ignore_unsupported, processes=processes)
    parsed = ParsedConfig.read(source)
    if "search" in parsed.values:
        reason = f"{parsed.place('search')}: search: describes several runs, not one"
        raise GymError(ErrorCode.CONFIG_INVALID, reason, f"run the search with: gym tune {parsed.file}")
    if parsed.dialect is None:
        return load_config(parsed, TrainingConfig, overrides), []
    job = parsed.dialect.job_of(parsed.values)
    if job in _COMMANDS:
        purpose, command = _COMMANDS[job]
        raise GymError(
            ErrorCode.USAGE, f"{parsed.file}: {purpose}, but gym train trains", command.format(parsed.file)
        )
    values = dict(parsed.values)
    ours = []
    for setting in overrides:
        ((path, value),) = parse_overrides([setting])
        if len(path) > 1 or path[0] in TrainingConfig.model_fields:
            ours.append(setting)
        else:
            values[str(path[0])] = value
    translation = parsed.dialect.translate(values, "train", processes)
    return _validated(parsed, translation, TrainingConfig, ours, ignore_unsupported=ignore_unsupported)


def load_predict_config(
    source: Source, overrides: Sequence[str] = (), *, ignore_unsupported: bool = False
) -> tuple[PredictConfig, list[str]]:
    """Load the config of `gym predict` from a file with gym-fed's or a dialect's keys.

    Raises:
        GymError: Errors of ``load_training_config``.
    """
    parsed = ParsedConfig.read(source)
    if parsed.dialect is None:
        return load_config(parsed, PredictConfig, overrides), []
    translation = parsed.dialect.translate(parsed.values, "predict")
    return _validated(parsed, translation, PredictConfig, overrides, ignore_unsupported=ignore_unsupported)


def load_inference(source: Source) -> tuple[dict[str, Any], list[str]]:
    """Load the model, adapters and sampling settings of a file in a dialect, with its notes.

    Raises:
        GymError: ``USAGE`` for a file that is not in a dialect; otherwise as in ``load_training_config``.
    """
    return _plain_values(source, "inference")


def load_export(source: Source) -> tuple[dict[str, Any], list[str]]:
    """Load the model, adapters and output of an export from a file in a dialect, with its notes.

    Raises:
        GymError: Errors of ``load_inference``; ``USAGE`` for a file without an output.
    """
    parsed = ParsedConfig.read(source)
    values, notes = _plain_values(parsed, "export")
    if "output" not in values:
        raise GymError(ErrorCode.USAGE, f"{parsed.file} has no export_dir", "name the new folder there")
    return values, notes


def as_yaml(source: Source, *, ignore_unsupported: bool = False) -> tuple[str, list[str]]:
    """Translate a file in a dialect to YAML with gym-fed's keys; comments name omitted keys.

    Raises:
        GymError: ``USAGE`` for a file that is not in a dialect; ``CONFIG_INVALID`` as in ``load_training_config``.
    """
    parsed = ParsedConfig.read(source)
    if parsed.dialect is None:
        reason = (
            f"{parsed.file}: not a {_titles()} file: no model_name_or_path with a stage or finetuning_type"
        )
        raise GymError(
            ErrorCode.USAGE, reason, "files of gym-fed need no import; check one with: gym configs validate"
        )
    load_training_config(parsed, ignore_unsupported=ignore_unsupported)  # check that the result can be loaded
    translation = parsed.dialect.translate(parsed.values, "train")
    comments = [f"# {key}: {text}" for key, text in {**translation.lost, **translation.notes}.items()]
    head = [f"# Translated from {parsed.file.name}, a file of {parsed.dialect.title}."]
    if comments:
        head += ["# Left out:", *comments]
    body = yaml.safe_dump(translation.values, sort_keys=False, allow_unicode=True)
    return "\n".join(head) + "\n" + body, comments


def _from_overrides(
    overrides: Sequence[str], *, ignore_unsupported: bool, processes: int | None
) -> tuple[TrainingConfig, list[str]]:
    """Return the config that consists only of overrides."""
    values: dict[str, Any] = {}
    placed = place_overrides(values, overrides)
    dialect = dialect_of(values)
    if dialect is None:
        return validate(values, TrainingConfig, "--set", None, placed | {()}), []
    translation = dialect.translate(values, "train", processes)
    lost = [f"--set: {key}: no counterpart: {why}" for key, why in translation.lost.items()]
    if lost and not ignore_unsupported:
        hint = "remove them, or pass --ignore-unsupported to train without them"
        raise GymError(ErrorCode.CONFIG_INVALID, "\n".join(lost), hint)
    notes = [f"{key}: {text}" for key, text in translation.notes.items()]
    return validate(translation.values, TrainingConfig, "--set", None, {()}), [*lost, *notes]


def _plain_values(source: Source, job: Job) -> tuple[dict[str, Any], list[str]]:
    parsed = ParsedConfig.read(source)
    if parsed.dialect is None:
        raise GymError(
            ErrorCode.USAGE, f"{parsed.file}: not a {_titles()} file", "give a model, or one of their files"
        )
    translation = parsed.dialect.translate(parsed.values, job)
    return translation.values, _notes(parsed, translation, ignore_unsupported=False)


def _validated(
    parsed: ParsedConfig,
    translation: Translation,
    schema: type[ConfigT],
    overrides: Sequence[str],
    *,
    ignore_unsupported: bool,
) -> tuple[ConfigT, list[str]]:
    """Return the validated translation and its notes."""
    notes = _notes(parsed, translation, ignore_unsupported=ignore_unsupported)
    values = translation.values
    placed = place_overrides(values, overrides)
    marks = {key: parsed.mark(origin) for key, origin in translation.origins.items() if key not in placed}
    return validate(values, schema, str(parsed.file), marks, placed), notes


def _notes(parsed: ParsedConfig, translation: Translation, *, ignore_unsupported: bool) -> list[str]:
    """Return a line for every omitted key.

    Raises:
        GymError: ``CONFIG_INVALID`` for omitted keys that affect the result.
    """
    lost = [f"{parsed.place(key)}: {key}: no counterpart: {why}" for key, why in translation.lost.items()]
    notes = [f"{parsed.place(key)}: {key}: {text}" for key, text in translation.notes.items()]
    if lost and not ignore_unsupported:
        reason = "\n".join(lost)
        remedy = "remove these keys, or pass --ignore-unsupported to continue without them"
        raise GymError(ErrorCode.CONFIG_INVALID, reason, remedy)
    return [*lost, *notes]


def _titles() -> str:
    return " or ".join(dialect.title for dialect in dialects()) or "known"
