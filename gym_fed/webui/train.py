"""The ``train`` screen: recipes, the form, checks while typing, the plan, and the start of a run.

The YAML is authoritative: the form edits it, the checks read it, and the run uses it.
"""

from __future__ import annotations

import re
import shlex
import threading
import time
from pathlib import Path
from typing import Annotated, Any

from fastapi import APIRouter, Query
from pydantic import Field, JsonValue, StrictBool, StrictFloat, StrictInt, StrictStr

from gym_fed.base.downloads.hub import search_models
from gym_fed.base.downloads.offer import offer_model
from gym_fed.base.modeling.weight_count import count_stored_weights
from gym_fed.config.recipes import get_recipe, recipes, relocated
from gym_fed.config.schema.base import StrictModel
from gym_fed.config.train.defaults import LARGE, ROW_KEYS, method_defaults
from gym_fed.config.train.training import TrainingConfig
from gym_fed.config.yaml.edit import with_value
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.core.files import write_atomically
from gym_fed.training.run.folder import is_held
from gym_fed.web.app import Changing, Looking
from gym_fed.webui.data import data_files
from gym_fed.webui.goals import GOALS, graders
from gym_fed.webui.inventory import local_bases
from gym_fed.webui.models import base_of, is_adapter
from gym_fed.webui.run_detail import CONFIGS_NAME, is_at_work
from gym_fed.webui.train_check import (
    MAX_CHARACTERS,
    given,
    input_problems,
    leaving,
    marks_of,
    missing,
    problems_of,
    read,
)
from gym_fed.webui.train_form import form
from gym_fed.webui.view_process import ViewProcess
from gym_fed.webui.workbench import MAX_ROWS, Workbench, plain, resolved, text

PLAN_SECONDS = 180
"""Time limit of a plan in seconds; planning takes tens of seconds for a model with billions of weights."""

Yaml = Annotated[str, Field(max_length=MAX_CHARACTERS)]


class _YamlText(StrictModel):
    text: Yaml


Key = Annotated[str, Field(pattern=r"^[A-Za-z_]\w*(\.[A-Za-z_]\w*)?$", max_length=120)]
Entries = Annotated[list[dict[str, JsonValue]], Field(max_length=100)]


class _PlanRequest(StrictModel):
    text: Yaml
    timed: bool = True
    """False for a plan without the time of a step, which takes seconds to measure."""


class _FormEdit(StrictModel):
    text: Yaml
    values: dict[Key, StrictBool | StrictInt | StrictFloat | StrictStr | Entries | None] = Field(
        max_length=20
    )
    """Values by key; None removes the key, which restores its default."""


class _Models(StrictModel):
    text: Yaml
    models: list[Annotated[str, Field(max_length=4096)]] = Field(min_length=1, max_length=MAX_ROWS)


class _HubSearch(StrictModel):
    query: str = Field(min_length=1, max_length=100)


class _StartRequest(StrictModel):
    text: Yaml
    yes: bool = False
    """True if the user agreed to the offered download."""
    overwrite: bool = False


class _ModelName(StrictModel):
    name: str = Field(max_length=200)


def routes(workbench: Workbench) -> APIRouter:
    """Create the routes below ``/train``."""
    router, planning = APIRouter(prefix="/train"), threading.Lock()
    plans = ViewProcess("gym_fed.webui.plan_views:PlanViews", workbench.folder, offline=False)

    @router.get("/recipes/{name}")
    def recipe(
        name: str, visitor: Looking, size: Annotated[str | None, Query(max_length=40)] = None
    ) -> dict[str, Any]:
        """Return the YAML of a recipe."""
        chosen = get_recipe(name)
        # Data paths are relative to the package, unless the recipe is in the workbench's folder.
        file = chosen.file
        is_here = file.is_relative_to(workbench.folder)
        yaml_text, _ = relocated(chosen, file.relative_to(workbench.folder) if is_here else file, size=size)
        return {"name": chosen.name, "text": yaml_text}

    @router.get("/form")
    def fields(visitor: Looking) -> dict[str, Any]:
        """Return the form with all keys of the schema."""
        return form()

    @router.get("/choices")
    def choices(visitor: Looking) -> dict[str, Any]:
        """Return what the screen offers: models, files, goals, graders, recipes and a free name for the run.

        ``base`` is that of an adapter.
        """
        models = local_bases(workbench)
        bases = {one.id: base_of(workbench, one, models) for one in models if is_adapter(workbench, one)}
        return {
            "models": [{**model.facts(), "base": bases.get(model.id)} for model in models],
            **data_files(workbench),
            "goals": [goal.facts() for goal in GOALS],
            "graders": graders(),
            "recipes": [{"name": r.name, "summary": r.summary, "sizes": list(r.sizes)} for r in recipes()],
            "free": free_output(workbench, workbench.runs / "my-run"),
        }

    @router.post("/edit")
    def edit(request: _FormEdit, visitor: Changing) -> dict[str, Any]:
        """Return the text with some values changed."""
        edited = request.text
        for key, value in request.values.items():
            edited = with_value(edited, tuple(key.split(".")), value)
        return {"text": edited}

    @router.post("/check")
    def check(request: _YamlText, visitor: Changing) -> dict[str, Any]:
        """Return the problems, notes and values of a text; see ``checked``."""
        return checked(workbench, request.text)

    @router.post("/plan")
    def plan(request: _PlanRequest, visitor: Changing) -> dict[str, Any]:
        """Plan a run with `gym train --plan`; ``{"waiting": true}`` while a plan for another page is in progress."""
        if not planning.acquire(blocking=False):
            return {"waiting": True}
        try:
            return plans.ask({"view": "plan", "text": request.text, "timed": request.timed}, PLAN_SECONDS)
        finally:
            planning.release()

    @router.post("/memory")
    def memory(request: _Models, visitor: Changing) -> dict[str, Any]:
        """Return the peak memory of the run on the first few of these models; a page requests the others again."""
        return plans.ask({"view": "memory", "text": request.text, "models": request.models}, PLAN_SECONDS)

    @router.post("/search")
    def search(request: _HubSearch, visitor: Changing) -> dict[str, Any]:
        """Search the Hub for models; this sends the query to the Hub."""
        return {"models": [vars(found) for found in search_models(request.query)]}

    @router.post("/offer")
    def offer(request: _ModelName, visitor: Changing) -> dict[str, Any]:
        """Return the download that a model needs and its size."""
        model = offer_model(request.name)
        return {"name": text(model.name), "describe": text(model.describe()), "bytes": model.missing_bytes}

    @router.post("/start")
    def start(request: _StartRequest, visitor: Changing) -> dict[str, Any]:
        """Start a run; return its path, job and command."""
        return started(workbench, request)

    return router


def checked(workbench: Workbench, yaml_text: str) -> dict[str, Any]:
    """Check a text, and return ``{problems, notes, given, chosen, leaves, missing, path, taken, free}``."""
    answer: dict[str, Any] = {
        "problems": [],
        "notes": [],
        "given": given(yaml_text),
        "chosen": [],
        "leaves": [],
        "missing": [],
        "path": "",
        "taken": "",
        "free": "",
    }
    try:
        config, answer["notes"] = read(yaml_text)
        answer["chosen"] = _chosen(config)
        answer["path"] = path_below_runs(workbench, str(config.output_dir))
        answer["taken"] = _taken(workbench, answer["path"])
        answer["free"] = free_output(workbench, workbench.runs / answer["path"])
        answer["missing"] = missing(config)
        answer["leaves"] = leaving(config)
        answer["problems"] = input_problems(workbench, config, marks_of(yaml_text))
    except GymError as error:
        answer["problems"] = problems_of(error, yaml_text)
    return answer


def _chosen(config: TrainingConfig) -> list[dict[str, Any]]:
    """Return defaults for the config's model if it is on this machine: ``[{key, value, reason}]``."""
    weights = None if config.model is None else count_stored_weights(config.model)
    defaults = [] if weights is None else method_defaults(config, weights)
    chosen = [
        {"key": default.key, "value": plain(default.value), "reason": default.reason} for default in defaults
    ]
    if weights is not None and weights > LARGE:
        open_keys = (key for key in ROW_KEYS if key not in config.model_fields_set)
        chosen += [
            {"key": key, "value": "by the rows", "reason": "chosen when the run starts"} for key in open_keys
        ]
    return chosen


def started(workbench: Workbench, request: _StartRequest) -> dict[str, Any]:
    """Write the YAML, start the run, and return ``{path, job}``.

    Raises:
        GymError: If the text is rejected; ``FILE_EXISTS`` for a finished run; ``STATE_LOCKED``.
    """
    config, _ = read(request.text)
    path = path_below_runs(workbench, str(config.output_dir))
    folder, state = workbench.runs / path, _taken(workbench, path)
    if state == "running":
        raise GymError(ErrorCode.STATE_LOCKED, f"{path}: a run is using it", "choose another output_dir")
    if state == "finished" and not request.overwrite:
        raise GymError(
            ErrorCode.FILE_EXISTS,
            f"{path} contains a finished run",
            "choose another output_dir, or overwrite it",
        )
    if (unknown := missing(config)) and not request.yes:
        raise GymError(
            ErrorCode.MODEL_NOT_FOUND,
            f"{', '.join(unknown)}: not on this machine",
            "agree to the download first",
        )
    file = kept_text(workbench, path, request.text)
    command = ["gym", "train", workbench.named(file)]
    command += ["--overwrite"] if request.overwrite and state else []
    command += ["--yes"] if request.yes else []
    job = workbench.jobs.start(command, title=f"train {path}", folder=folder)
    return {"path": path, "job": job.facts(), "command": shlex.join(command)}


def kept_text(workbench: Workbench, path: str, yaml_text: str) -> Path:
    """Write the text of a run or a search to a new file.

    Args:
        workbench: Workbench with the folder of runs.
        path: Path of the run, which determines the file name.
        yaml_text: The checked text.
    """
    name = re.sub(r"[^\w.-]+", "-", path.rpartition("/")[2]) or "run"
    file = workbench.runs / CONFIGS_NAME / f"{time.strftime('%Y%m%d-%H%M%S')}-{name}.yaml"
    write_atomically(file, yaml_text.encode("utf-8", "replace"))
    return file


def path_below_runs(workbench: Workbench, output_dir: str) -> str:
    """Return the path of a run below the folder of runs.

    Raises:
        GymError: ``CONFIG_INVALID`` for a path outside that folder, since pages would not show the run.
    """
    folder = resolved(workbench.folder, output_dir)
    if (
        folder is None
        or workbench.runs not in folder.parents
        or any(part.startswith(".") for part in folder.relative_to(workbench.runs).parts)
    ):
        raise GymError(
            ErrorCode.CONFIG_INVALID,
            f"output_dir: {text(output_dir)} is not below {text(workbench.runs)}",
            "use a folder below it, or start gym webui with another --runs",
        )
    return folder.relative_to(workbench.runs).as_posix()


def free_output(workbench: Workbench, folder: Path) -> str:
    """Return an ``output_dir`` that does not exist: the folder, or its name with the next number."""
    stem, _, last = folder.name.rpartition("-")
    stem, first = (stem, int(last)) if stem and last.isdecimal() and len(last) < 6 else (folder.name, 1)
    numbered = (folder.with_name(f"{stem}-{number}") for number in range(max(first, 1) + 1, first + 10_000))
    return workbench.named(next(path for path in (folder, *numbered) if not path.exists()))


def _taken(workbench: Workbench, path: str) -> str:
    """Return the state of an output folder: ``running``, ``finished``, ``unfinished``, or empty if unused."""
    folder = workbench.runs / path
    if (folder / "result.json").exists():
        return "finished"  # its process may still be exiting
    if is_held(folder) or is_at_work(folder, workbench.jobs):
        return "running"
    return "unfinished" if (folder / "run.json").exists() else ""
