"""Check the YAML of a run while it is typed, and locate every problem by line and column."""

from __future__ import annotations

import json
import re
import shlex
import tempfile
import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from gym_fed.base.downloads import missing_model
from gym_fed.base.downloads.config_needs import hub_places, models_of
from gym_fed.base.modeling.weight_count import count_stored_weights
from gym_fed.config.train.defaults import LARGE
from gym_fed.config.train.run import ALWAYS
from gym_fed.config.train.training import SearchConfig, TrainingConfig
from gym_fed.config.training_file import load_training_config
from gym_fed.config.yaml.file import load_config
from gym_fed.config.yaml.strict import KeyPath, Mark, parse_config
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.core.json_files import read_object
from gym_fed.core.registries import ALGORITHMS, TUNING
from gym_fed.data.reading import iter_rows, parse_columns, renaming
from gym_fed.data.rows import as_kind
from gym_fed.tracking.trackers.base import flat
from gym_fed.webui.workbench import Workbench, plain, resolved, text

_BY_ROWS = (".jsonl", ".ndjson", ".csv", ".tsv")
"""Formats whose first row can be read without reading the whole file."""
_MAX_WHOLE_BYTES = 4 * 2**20
"""Maximum size in bytes of a file in another format, which is read completely."""

_Config = TypeVar("_Config", bound=TrainingConfig)

MAX_CHARACTERS = 200_000
_MAX_PROBLEMS = 100
_PLACE = re.compile(r"(\d+):(\d+): (?:([\w.-]+): )?(.*)", re.DOTALL)
_SOURCE = "config.yaml"
"""The name of the config text in messages."""
_REMOTE_KEYS = ("base_url", "url", "endpoint")
"""Keys of graders that call a server."""
_one_at_a_time = threading.Lock()
"""Lock around ``warnings.catch_warnings``, which is global."""


def read(yaml_text: str) -> tuple[TrainingConfig, list[str]]:
    """Read the config of a text, with notes on aliases; see ``read_with``."""
    return read_with(yaml_text, load_training_config)


def read_search(yaml_text: str) -> tuple[SearchConfig, list[str]]:
    """Read the config of a search as `gym tune` does; see ``read_with``."""
    return read_with(yaml_text, lambda file: (load_config(file, SearchConfig), []))


def read_with(yaml_text: str, load: Callable[[Path], tuple[_Config, list[str]]]) -> tuple[_Config, list[str]]:
    """Read a text with ``load`` and return the config and the notes.

    Raises:
        GymError: Errors from ``load``; locations refer to ``config.yaml``.
    """
    if len(yaml_text) > MAX_CHARACTERS:
        raise GymError(ErrorCode.TOO_LARGE, f"{_SOURCE}: more than {MAX_CHARACTERS} characters")
    with _one_at_a_time, tempfile.TemporaryDirectory(prefix="gym-check-") as folder:
        file = Path(folder) / _SOURCE
        file.write_bytes(yaml_text.encode("utf-8", "replace"))
        try:
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                config, notes = load(file)
        except GymError as error:
            raise GymError(error.code, _named(error.message, folder), _named(error.hint, folder)) from error
    return config, [_named(text(note), folder) for note in (*notes, *(warning.message for warning in caught))]


def problems_of(error: GymError, yaml_text: str) -> list[dict[str, Any]]:
    """Return ``{line, column, key, message}`` for every line of an error; line 0 if the location is unknown."""
    marks = marks_of(yaml_text)
    problems = []
    for line in error.message.splitlines():
        place, _, rest = line.partition(f"{_SOURCE}:")
        at = _PLACE.fullmatch(rest) if not place else None
        if at is None:
            key, colon, remainder = line.partition(": ")
            at_line, column = marks.get((key,), (0, 0))
            is_key = colon and at_line
            message = text(remainder if is_key else line)
            problems.append(
                {"line": at_line, "column": column, "key": key if is_key else "", "message": message}
            )
            continue
        key = at[3] or ""
        problems.append({"line": int(at[1]), "column": int(at[2]), "key": key, "message": text(at[4])})
    if problems and error.hint:
        problems[-1]["hint"] = text(error.hint)
    return problems[:_MAX_PROBLEMS]


def marks_of(yaml_text: str) -> dict[KeyPath, Mark]:
    """Return the position of every key; empty for invalid YAML."""
    try:
        return parse_config(Path(_SOURCE), yaml_text)[1]
    except GymError:
        return {}


def given(yaml_text: str) -> dict[str, Any]:
    """Return the values in the text by dotted key; empty for invalid YAML."""
    try:
        values, _ = parse_config(Path(_SOURCE), yaml_text)
    except GymError:
        return {}
    values_by_key: dict[str, Any] = plain(flat({str(key): value for key, value in values.items()}))
    return values_by_key


def leaving(config: TrainingConfig) -> list[str]:
    """Return descriptions of everything that a run uploads or downloads."""
    lines = []
    sent = [name for name in config.tracking if name not in ALWAYS]
    if sent and config.tracker.mode == "online":
        where = f" at {text(config.tracker.uri)}" if config.tracker.uri else ""
        lines.append(f"Figures and settings of the run go to {', '.join(sent)}{where}, while it runs.")
    for grader in config.graders:
        for url in (getattr(grader, key, None) for key in _REMOTE_KEYS):
            if isinstance(url, str) and url:
                lines.append(f"Prompts and answers go to the grader {text(grader.grader)} at {text(url)}.")
    lines += [f"The model {text(name)} is fetched from the Hugging Face Hub." for name in missing(config)]
    for source in (*config.data, *config.eval_data):
        lines += [
            f"Rows of {text(name)} are read from the Hugging Face Hub, unless its cache has them."
            for name, _ in hub_places(source)
        ]
        if source.path is not None and "://" in source.path:
            lines.append(f"Rows are read from {text(source.path)}.")
    return list(dict.fromkeys(lines))


def missing(config: TrainingConfig) -> list[str]:
    """Return the models of a run that are not on this machine.

    Raises:
        GymError: If a path does not contain a model.
    """
    names = []
    for name in dict.fromkeys(models_of(config)):
        try:
            if missing_model(name):
                names.append(name)
        except GymError as error:
            key = "model: " if name == config.model else ""
            raise GymError(error.code, f"{key}{error.message}", error.hint) from error
    return names


def _named(message: str, folder: str) -> str:
    return message.replace(f"{folder}/", "")


def input_problems(
    workbench: Workbench, config: TrainingConfig, marks: dict[KeyPath, Mark]
) -> list[dict[str, Any]]:
    """Return ``{line, column, key, message, hint}`` for inputs that ``gym train`` would reject.

    An input that is not chosen yet also has ``choose``, a description of the input.
    """
    problems: list[dict[str, Any]] = []
    if config.model is None and config.model_init is None:
        problem = _problem(marks, ("model",), "not set", "set model or model_init")
        problems.append({**problem, "choose": "a model"})
    if _is_adapter_on_adapter(workbench, config):
        message = f"{config.model} is itself an adapter"
        hint = f"set model to its base, and adapter: {config.model} to train it further, or finetuning: full"
        problems.append(_problem(marks, ("model",), message, hint))
    if not config.data:
        problem = _problem(marks, ("data",), "no rows to train on", "list at least one path or tasks entry")
        problems.append({**problem, "choose": "data"})
    for part in ("data", "eval_data"):
        for number, source in enumerate(getattr(config, part)):
            file = None if source.path is None else _file(workbench, source.path)
            if file is None:
                continue
            try:
                if not file.exists() or _is_cheap(file):
                    _, row = next(iter_rows(file, source.format, rename=renaming(source.columns)))
                    as_kind([row], ALGORITHMS.type_of(config.algorithm).row_kind)
            except GymError as error:
                message = error.message.replace(f"{workbench.folder}/", "")
                problems.append(_problem(marks, (part, number, "path"), message, _as_key(error.hint)))
    return problems


def _is_adapter_on_adapter(workbench: Workbench, config: TrainingConfig) -> bool:
    """Return True if the model is an adapter's folder and an adapter is trained, by the config or by default."""
    folder = None if config.model is None else resolved(workbench.folder, config.model)
    if folder is None or not (folder / "adapter_config.json").is_file():
        return False
    if "finetuning" in config.model_fields_set:
        return bool(TUNING.type_of(config.finetuning).is_adapter)
    base = read_object(folder / "adapter_config.json").get("base_model_name_or_path")
    weights = count_stored_weights(base) if isinstance(base, str) else None
    return weights is not None and weights > LARGE


def _as_key(hint: str) -> str:
    """Replace ``--columns`` in a hint with the config's key."""
    before, option, text = hint.partition("--columns ")
    if not option or not text:
        return hint
    try:
        columns = parse_columns(shlex.split(text)[0])
    except (ValueError, GymError):  # the hint is not a single option
        return hint
    return f"{before}columns: {json.dumps(columns, ensure_ascii=False)}"


def _file(workbench: Workbench, path: str) -> Path | None:
    """Return the file of a path; None for patterns, URLs and files outside the workbench's folder."""
    if "://" in path or any(sign in path for sign in "*?["):
        return None
    try:
        return workbench.inside(path)
    except GymError:
        return None


def _is_cheap(file: Path) -> bool:
    return file.is_file() and (file.suffix.lower() in _BY_ROWS or file.stat().st_size <= _MAX_WHOLE_BYTES)


def _problem(marks: dict[KeyPath, Mark], key: KeyPath, message: str, hint: str) -> dict[str, Any]:
    line, column = next((marks[key[:end]] for end in range(len(key), 0, -1) if key[:end] in marks), (0, 0))
    name = ".".join(str(part) for part in key)
    return {"line": line, "column": column, "key": name, "message": text(message), "hint": text(hint)}
