"""Reads a training config from a file with our keys or LLaMA-Factory's; errors carry the file's own lines."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import yaml

from gym_fed.config.llamafactory.inference import translate_export, translate_inference, translate_predict
from gym_fed.config.llamafactory.jobs import job_of
from gym_fed.config.llamafactory.settings import config_of_settings, with_their_keys
from gym_fed.config.llamafactory.translate import translate
from gym_fed.config.llamafactory.translation import Translation, is_llamafactory
from gym_fed.config.predict import PredictConfig
from gym_fed.config.schema.base import StrictModel
from gym_fed.config.train.training import TrainingConfig
from gym_fed.config.yaml.file import load_config, place_overrides, validate
from gym_fed.config.yaml.strict import KeyPath, Mark, parse_config, read_config_text
from gym_fed.core.errors import ErrorCode, GymError

ConfigT = TypeVar("ConfigT", bound=StrictModel)

_COMMANDS = {
    "predict": ("predicts", "gym predict {}"),
    "export": ("merges and exports a model", "gym export {}"),
    "inference": ("answers with a model", "gym chat {0}, or gym api {0}"),
}


def load_training_config(
    path: str | Path | None,
    overrides: Sequence[str] = (),
    *,
    ignore_unsupported: bool = False,
    processes: int | None = None,
) -> tuple[TrainingConfig, list[str]]:
    """Read the config of a run.

    Args:
        path: A YAML file of ours, or of LLaMA-Factory; None where the overrides are all there is.
        overrides: ``a.b=value`` settings with our keys; they win over the file. Beside a LLaMA-Factory file, or
            without one, its keys are taken, too.
        ignore_unsupported: Ignore the keys that have no counterpart; the notes name them.
        processes: How many will share the run; a LLaMA-Factory file shards nothing in one. None leaves it open.

    Returns:
        The config, and for a LLaMA-Factory file a line for every key that was left out.

    Raises:
        GymError: ``CONFIG_INVALID`` listing every problem, a line each; see ``load_config`` for the others.
    """
    if path is None:
        return config_of_settings(overrides, ignore_unsupported=ignore_unsupported, processes=processes)
    file = Path(path)
    given, marks = parse_config(file, read_config_text(file))
    if "search" in given:
        line, column = marks.get(("search",), (1, 1))
        raise GymError(
            ErrorCode.CONFIG_INVALID,
            f"{file}:{line}:{column}: search: describes many runs, not one",
            f"search with: gym tune {file}",
        )
    if not is_llamafactory(given):
        return load_config(file, TrainingConfig, overrides), []
    _require_training(file, given)
    overrides = with_their_keys(given, overrides)
    return _validated(
        file,
        marks,
        translate(given, processes),
        TrainingConfig,
        overrides,
        ignore_unsupported=ignore_unsupported,
    )


def load_predict_config(
    path: str | Path, overrides: Sequence[str] = (), *, ignore_unsupported: bool = False
) -> tuple[PredictConfig, list[str]]:
    """Read what `gym predict` does from a file of ours, or one of LLaMA-Factory with ``do_predict``.

    Raises:
        GymError: As ``load_training_config``.
    """
    file = Path(path)
    given, marks = parse_config(file, read_config_text(file))
    if not is_llamafactory(given):
        return load_config(file, PredictConfig, overrides), []
    return _validated(
        file, marks, translate_predict(given), PredictConfig, overrides, ignore_unsupported=ignore_unsupported
    )


def predicts(path: str | Path) -> bool:
    """Whether a file is LLaMA-Factory's and predicts, so that `gym train` does what `gym predict` does."""
    file = Path(path)
    given, _ = parse_config(file, read_config_text(file))
    return is_llamafactory(given) and job_of(given) == "predict"


def load_inference(path: str | Path) -> tuple[dict[str, Any], list[str]]:
    """The model, adapters and sampling of one of LLaMA-Factory's files, and its notes; see ``translate_inference``.

    Raises:
        GymError: ``USAGE`` for a file that is not LLaMA-Factory's; else as ``load_training_config``.
    """
    return _plain_values(path, translate_inference)


def load_export(path: str | Path) -> tuple[dict[str, Any], list[str]]:
    """The same of a file that merges; see ``translate_export``.

    Raises:
        GymError: As ``load_inference``; ``USAGE`` for a file without ``export_dir``.
    """
    values, notes = _plain_values(path, translate_export)
    if "output" not in values:
        raise GymError(ErrorCode.USAGE, f"{path}: has no export_dir", "name the new folder there")
    return values, notes


def _plain_values(
    path: str | Path, read: Callable[[dict[str, Any]], Translation]
) -> tuple[dict[str, Any], list[str]]:
    file = Path(path)
    given, marks = parse_config(file, read_config_text(file))
    if not is_llamafactory(given):
        raise GymError(
            ErrorCode.USAGE, f"{file}: not a LLaMA-Factory file", "give a model, or one of their files"
        )
    done = read(given)
    return done.values, _notes(file, marks, done, ignore_unsupported=False)


def _validated(
    file: Path,
    marks: dict[KeyPath, Mark],
    done: Translation,
    schema: type[ConfigT],
    overrides: Sequence[str],
    *,
    ignore_unsupported: bool,
) -> tuple[ConfigT, list[str]]:
    """A translation as a config, and its notes."""
    notes = _notes(file, marks, done, ignore_unsupported=ignore_unsupported)
    values = done.values
    placed = place_overrides(values, overrides)
    ours: dict[KeyPath, Mark] = {
        key: _mark(marks, origin) for key, origin in done.origins.items() if key not in placed
    }
    return validate(values, schema, str(file), ours, placed), notes


def _notes(
    file: Path, marks: dict[KeyPath, Mark], done: Translation, *, ignore_unsupported: bool
) -> list[str]:
    """A line for every key that was left out.

    Raises:
        GymError: ``CONFIG_INVALID`` for those on which the result depends.
    """

    def at(key: str) -> str:
        line, column = _mark(marks, key)
        return f"{file}:{line}:{column}"

    lost = [f"{at(key)}: {key}: no counterpart: {why}" for key, why in done.lost.items()]
    notes = [f"{at(key)}: {key}: {text}" for key, text in done.notes.items()]
    if lost and not ignore_unsupported:
        raise GymError(
            ErrorCode.CONFIG_INVALID,
            "\n".join(lost),
            "remove these keys, or pass --ignore-unsupported to go on without them",
        )
    return [*lost, *notes]


def _require_training(file: Path, given: dict[str, Any]) -> None:
    """Refuse a file for another command.

    Raises:
        GymError: ``USAGE``.
    """
    job = job_of(given)
    if job in _COMMANDS:
        what, command = _COMMANDS[job]
        raise GymError(ErrorCode.USAGE, f"{file}: {what}, and gym train trains", command.format(file))


def _mark(marks: dict[KeyPath, Mark], key: str) -> Mark:
    """Where a key stands; ``peft_config.r`` within its section."""
    path = tuple(key.split("."))
    while path and path not in marks:
        path = path[:-1]
    return marks.get(path, (1, 1))


def as_yaml(path: str | Path, *, ignore_unsupported: bool = False) -> tuple[str, list[str]]:
    """A LLaMA-Factory file with our keys, and the lines of comment that name what was left out of it.

    Raises:
        GymError: ``USAGE`` for a file that is not LLaMA-Factory's; ``CONFIG_INVALID`` as ``load_training_config``.
    """
    file = Path(path)
    given, _ = parse_config(file, read_config_text(file))
    if not is_llamafactory(given):
        raise GymError(
            ErrorCode.USAGE,
            f"{file}: not a LLaMA-Factory file: no model_name_or_path with a stage or finetuning_type",
            "ours need no import; check one with: gym configs validate",
        )
    done = translate(given)
    if done.lost and not ignore_unsupported:
        load_training_config(file)  # names each with its line
    left = {**done.lost, **done.notes}
    comments = [f"# {key}: {text}" for key, text in left.items()]
    head = [f"# Translated from {file.name}, a file of LLaMA-Factory."]
    if comments:
        head += ["# Left out:", *comments]
    body = yaml.safe_dump(done.values, sort_keys=False, allow_unicode=True)
    return "\n".join(head) + "\n" + body, comments
