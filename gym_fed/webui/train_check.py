"""Checks the YAML of a run as one types: by `gym train`'s own reader, with the line and column of every problem."""

from __future__ import annotations

import re
import tempfile
import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from gym_fed.base.downloads import missing_model
from gym_fed.base.downloads.needed import hub_places, models_of
from gym_fed.config.train.search import SearchConfig
from gym_fed.config.train.tracking import ALWAYS
from gym_fed.config.train.training import TrainingConfig
from gym_fed.config.training_file import load_training_config
from gym_fed.config.yaml.file import load_config
from gym_fed.config.yaml.strict import KeyPath, Mark, parse_config
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.tracking.trackers.base import flat
from gym_fed.webui.plain import plain, text

_Config = TypeVar("_Config", bound=TrainingConfig)

MAX_CHARACTERS = 200_000
_MAX_PROBLEMS = 100
_PLACE = re.compile(r"(\d+):(\d+): (?:([\w.-]+): )?(.*)", re.DOTALL)
_SOURCE = "config.yaml"
"""How messages name the text."""
_REMOTE_KEYS = ("base_url", "url", "endpoint")
"""Of a grader that calls a server."""
_one_at_a_time = threading.Lock()
"""What notes are collected in is one for the whole process."""


def read(yaml_text: str) -> tuple[TrainingConfig, list[str]]:
    """The config of a text, and notes on words of other platforms and old names; see ``read_with``."""
    return read_with(yaml_text, load_training_config)


def read_search(yaml_text: str) -> tuple[SearchConfig, list[str]]:
    """The config of a search, as `gym tune` reads it, and notes on old names; see ``read_with``."""
    return read_with(yaml_text, lambda file: (load_config(file, SearchConfig), []))


def read_with(yaml_text: str, load: Callable[[Path], tuple[_Config, list[str]]]) -> tuple[_Config, list[str]]:
    """What ``load`` makes of a file with this text, and its notes.

    Raises:
        GymError: As ``load``; places name ``config.yaml``.
    """
    if len(yaml_text) > MAX_CHARACTERS:
        raise GymError(ErrorCode.TOO_LARGE, f"{_SOURCE}: more than {MAX_CHARACTERS} characters")
    with _one_at_a_time, tempfile.TemporaryDirectory(prefix="gym-check-") as folder:
        file = Path(folder) / _SOURCE
        file.write_bytes(yaml_text.encode("utf-8", "replace"))
        try:
            with warnings.catch_warnings(record=True) as said:
                warnings.simplefilter("always")
                config, notes = load(file)
        except GymError as error:
            raise GymError(error.code, _named(error.message, folder), _named(error.hint, folder)) from error
    return config, [_named(text(note), folder) for note in (*notes, *(one.message for one in said))]


def problems_of(error: GymError, yaml_text: str) -> list[dict[str, Any]]:
    """``{line, column, key, message}`` of every line of an error; line 0 where it has no place."""
    marks = marks_of(yaml_text)
    found = []
    for line in error.message.splitlines():
        place, _, rest = line.partition(f"{_SOURCE}:")
        at = _PLACE.fullmatch(rest) if not place else None
        if at is None:
            key, colon, said = line.partition(": ")
            at_line, column = marks.get((key,), (0, 0))
            is_key = colon and at_line
            message = text(said if is_key else line)
            found.append(
                {"line": at_line, "column": column, "key": key if is_key else "", "message": message}
            )
            continue
        key = at[3] or ""
        found.append({"line": int(at[1]), "column": int(at[2]), "key": key, "message": text(at[4])})
    if found and error.hint:
        found[-1]["hint"] = text(error.hint)
    return found[:_MAX_PROBLEMS]


def marks_of(yaml_text: str) -> dict[KeyPath, Mark]:
    """Where each key stands; empty for a text that cannot be read."""
    try:
        return parse_config(Path(_SOURCE), yaml_text)[1]
    except GymError:
        return {}


def given(yaml_text: str) -> dict[str, Any]:
    """The values that a text gives, by dotted key; empty for one that cannot be read."""
    try:
        values, _ = parse_config(Path(_SOURCE), yaml_text)
    except GymError:
        return {}
    found: dict[str, Any] = plain(flat({str(key): value for key, value in values.items()}))
    return found


def leaving(config: TrainingConfig) -> list[str]:
    """A line for everything of a run that leaves this machine, or is fetched from elsewhere."""
    found = []
    sent = [name for name in config.tracking if name not in ALWAYS]
    if sent and config.tracker.mode == "online":
        where = f" at {text(config.tracker.uri)}" if config.tracker.uri else ""
        found.append(f"Figures and settings of the run go to {', '.join(sent)}{where}, while it runs.")
    for grader in config.graders:
        for url in (getattr(grader, key, None) for key in _REMOTE_KEYS):
            if isinstance(url, str) and url:
                found.append(f"Prompts and answers go to the grader {text(grader.grader)} at {text(url)}.")
    found += [f"The model {text(name)} is fetched from the Hugging Face Hub." for name in missing(config)]
    for source in (*config.data, *config.eval_data):
        found += [
            f"Rows of {text(name)} are read from the Hugging Face Hub, unless its cache has them."
            for name, _ in hub_places(source)
        ]
        if source.path is not None and "://" in source.path:
            found.append(f"Rows are read from {text(source.path)}.")
    return list(dict.fromkeys(found))


def missing(config: TrainingConfig) -> list[str]:
    """Models that a run needs and that are not on this machine.

    Raises:
        GymError: For a path that holds no model.
    """
    found = []
    for name in dict.fromkeys(models_of(config)):
        try:
            if missing_model(name):
                found.append(name)
        except GymError as error:
            key = "model: " if name == config.model else ""
            raise GymError(error.code, f"{key}{error.message}", error.hint) from error
    return found


def _named(message: str, folder: str) -> str:
    return message.replace(f"{folder}/", "")
