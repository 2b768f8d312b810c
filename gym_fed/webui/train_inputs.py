"""What a run would miss: its model, its rows, a file of them that is not there or is laid out otherwise."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

from gym_fed.config.train.training import TrainingConfig
from gym_fed.config.yaml.strict import KeyPath, Mark
from gym_fed.core.errors import GymError
from gym_fed.data.columns import parse_columns, renaming
from gym_fed.data.reading import iter_rows
from gym_fed.webui.plain import text
from gym_fed.webui.workbench import Workbench

_BY_ROWS = (".jsonl", ".ndjson", ".csv", ".tsv")
"""Files whose first row costs the same however long they are."""
_MAX_WHOLE_BYTES = 4 * 2**20
"""Of other files, which are read whole for their first row."""


def input_problems(
    workbench: Workbench, config: TrainingConfig, marks: dict[KeyPath, Mark]
) -> list[dict[str, Any]]:
    """``{line, column, key, message, hint}`` of what ``gym train`` would refuse once it has begun."""
    found = []
    if config.model is None and config.model_init is None:
        found.append(_problem(marks, ("model",), "not given", "name a model, or give model_init"))
    if not config.data:
        found.append(
            _problem(marks, ("data",), "no rows to train on", "list at least one path or tasks entry")
        )
    for part in ("data", "eval_data"):
        for number, source in enumerate(getattr(config, part)):
            file = None if source.path is None else _file(workbench, source.path)
            if file is None:
                continue
            try:
                if not file.exists() or _is_cheap(file):
                    next(iter_rows(file, source.format, rename=renaming(source.columns)))
            except GymError as error:
                said = error.message.replace(f"{workbench.folder}/", "")
                found.append(_problem(marks, (part, number, "path"), said, _as_key(error.hint)))
    return found


def _as_key(hint: str) -> str:
    """A hint with the key of a config in the place of ``--columns``."""
    before, option, text = hint.partition("--columns ")
    if not option or not text:
        return hint
    try:
        columns = parse_columns(shlex.split(text)[0])
    except (ValueError, GymError):  # what follows is no option alone
        return hint
    return f"{before}columns: {json.dumps(columns, ensure_ascii=False)}"


def _file(workbench: Workbench, path: str) -> Path | None:
    """The file of a path; None for a pattern, a URL, and a file that no page shows."""
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
