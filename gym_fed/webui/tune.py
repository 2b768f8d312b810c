"""The ``tune`` screen: hyperparameter searches with their trials, and the start of a search.

The YAML is authoritative, as on the ``train`` screen; a search is resumed from ``search.yaml`` in its folder.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Annotated, Any

from fastapi import APIRouter, Query
from pydantic import Field

from gym_fed.config.schema.base import StrictModel
from gym_fed.config.train.training import SearchSettings
from gym_fed.config.yaml.strict import parse_config
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.core.files import lies_in
from gym_fed.training.run.folder import is_held
from gym_fed.web.app import Changing, Looking
from gym_fed.webui.run_detail import is_at_work, job_of
from gym_fed.webui.train import kept_text, path_below_runs
from gym_fed.webui.train_check import MAX_CHARACTERS, problems_of, read_search
from gym_fed.webui.train_form import fields_of, form
from gym_fed.webui.workbench import MAX_ROWS, Workbench, plain

SEARCH_NAME = "search.yaml"
MAX_TRIALS = 2000
_MAX_FILE_BYTES = 16 * 2**20
_MAX_DEPTH = 4

PathParameter = Annotated[str, Query(min_length=1, max_length=500)]


class _SearchText(StrictModel):
    text: str = Field(max_length=MAX_CHARACTERS)


class _Path(StrictModel):
    path: str = Field(min_length=1, max_length=500)


def routes(workbench: Workbench) -> APIRouter:
    """Create the routes below ``/tune``."""
    router = APIRouter(prefix="/tune")

    @router.get("")
    def listed(visitor: Looking) -> dict[str, Any]:
        """List the searches and the form of a new one."""
        folders = sorted(_searches(workbench.runs), key=lambda path: path.stat().st_mtime, reverse=True)
        rows = [_brief(workbench, folder) for folder in folders[:MAX_ROWS]]
        return {"runs": str(workbench.runs), "searches": rows, "total": len(folders), "form": _form()}

    @router.get("/search")
    def search(visitor: Looking, path: PathParameter) -> dict[str, Any]:
        """Return a search with its trials."""
        folder = _folder(workbench, path)
        trials = _trials(folder)
        return {
            **_brief(workbench, folder),
            "trials": trials[-MAX_TRIALS:],
            "unfinished": _unfinished(folder, trials),
            "best_file": workbench.named(folder / "best.yaml"),
            "best_text": _text(folder / "best.yaml")[:MAX_CHARACTERS],
            "text": _text(folder / SEARCH_NAME)[:MAX_CHARACTERS],
        }

    @router.post("/check")
    def check(request: _SearchText, visitor: Changing) -> dict[str, Any]:
        """Return the problems and notes of a text, its search space and its folder."""
        try:
            config, notes = read_search(request.text)
            path = path_below_runs(workbench, str(config.output_dir))
        except GymError as error:
            return {"problems": problems_of(error, request.text), "notes": [], "search": _given(request.text)}
        return {
            "problems": [],
            "notes": notes,
            "search": _given(request.text),
            "path": path,
            "exists": (workbench.runs / path / SEARCH_NAME).exists(),
        }

    @router.post("/start")
    def start(request: _SearchText, visitor: Changing) -> dict[str, Any]:
        """Start `gym tune` on a text; return its path and job."""
        config, _ = read_search(request.text)
        path = path_below_runs(workbench, str(config.output_dir))
        return _started(workbench, path, kept_text(workbench, path, request.text))

    @router.post("/resume")
    def resume(request: _Path, visitor: Changing) -> dict[str, Any]:
        """Resume a search; return its path and job."""
        folder = _folder(workbench, request.path)
        path = folder.relative_to(workbench.runs).as_posix()
        return _started(workbench, path, folder / SEARCH_NAME)

    return router


@cache
def _form() -> dict[str, Any]:
    """Return ``{keys, settings}``: the keys that a search may vary, and the fields of its settings."""
    schema = SearchSettings.model_json_schema()
    settings = {key: value for key, value in schema["properties"].items() if key != "parameters"}
    keys = [field for group in form()["groups"] for field in group["fields"] if field["kind"] != "yaml"]
    return {
        "keys": [{"key": field["key"], "kind": field["kind"]} for field in keys],
        "settings": [
            field for key, value in settings.items() for field in fields_of(key, value, schema["$defs"])
        ],
    }


def _started(workbench: Workbench, path: str, file: Path) -> dict[str, Any]:
    """Start `gym tune` on a file.

    Raises:
        GymError: ``STATE_LOCKED`` while the search runs.
    """
    folder = workbench.runs / path
    if is_held(folder) or is_at_work(folder, workbench.jobs):
        raise GymError(ErrorCode.STATE_LOCKED, f"{path}: a search is using it", "stop it first")
    command = ["gym", "tune", workbench.named(file)]
    job = workbench.jobs.start(command, title=f"tune {path}", folder=folder)
    return {"path": path, "job": job.facts()}


def _searches(runs: Path) -> Iterator[Path]:
    """Yield the folders of searches below the folder of runs; folders inside a search are its trials."""
    for place, folders, files in os.walk(runs):
        if SEARCH_NAME in files:
            yield Path(place)
            folders.clear()
        elif len(Path(place).relative_to(runs).parts) >= _MAX_DEPTH:
            folders.clear()
        folders[:] = [name for name in folders if name[0] != "."]


def _brief(workbench: Workbench, folder: Path) -> dict[str, Any]:
    trials, settings = _trials(folder), _given(_text(folder / SEARCH_NAME))
    last = job_of(folder, workbench.jobs.list())
    direction = settings.get("direction", "minimize")
    complete = [
        trial for trial in trials if trial["state"] == "complete" and isinstance(trial["value"], float)
    ]
    choose = min if direction == "minimize" else max
    best = choose(complete, key=lambda trial: trial["value"], default=None)
    return {
        "path": folder.relative_to(workbench.runs).as_posix(),
        "metric": settings.get("metric", "eval_loss"),
        "direction": direction,
        "wanted": settings.get("num_trials", SearchSettings.model_fields["num_trials"].default),
        "parameters": settings.get("parameters", {}),
        "ended": len(trials),
        "complete": len(complete),
        "best": best,
        "is_running": is_held(folder) or is_at_work(folder, workbench.jobs),
        "job": None if last is None else last.facts(),
        "changed": folder.stat().st_mtime,
    }


def _folder(workbench: Workbench, path: str) -> Path:
    """Return the folder of a search.

    Raises:
        GymError: ``PERMISSION_DENIED``; ``NOT_FOUND``.
    """
    folder = workbench.inside(path, root=workbench.runs)
    if not (folder / SEARCH_NAME).is_file():
        raise GymError(ErrorCode.NOT_FOUND, f"no search in {path!r}", "choose one from the list")
    return folder


def _trials(folder: Path) -> list[dict[str, Any]]:
    """Read the completed trials from ``trials.json``; empty if the file is invalid."""
    try:
        values = json.loads(_text(folder / "trials.json") or "[]")
        return [plain({key: trial[key] for key in _OF_TRIAL}) for trial in values]
    except (ValueError, KeyError, TypeError, RecursionError):
        return []


_OF_TRIAL = ("number", "parameters", "state", "value", "folder", "why")


def _unfinished(folder: Path, trials: list[dict[str, Any]]) -> list[str]:
    """Return the folders of trials that are running or were interrupted."""
    ended = {str(trial["folder"]) for trial in trials}
    try:
        names = sorted(os.listdir(folder / "trials"))
    except OSError:
        return []
    return [name for name in names if name not in ended][:20]


def _given(yaml_text: str) -> dict[str, Any]:
    """Return the ``search`` section of a text; empty for invalid YAML."""
    try:
        section = parse_config(Path(SEARCH_NAME), yaml_text)[0].get("search")
    except GymError:
        return {}
    return dict(plain(section)) if isinstance(section, dict) else {}


def _text(file: Path) -> str:
    if not lies_in(file, file.parent):  # also a named pipe, which would block
        return ""
    try:
        with file.open("rb") as stream:
            return stream.read(_MAX_FILE_BYTES).decode("utf-8", "replace")
    except OSError:
        return ""
