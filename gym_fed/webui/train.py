"""The screen ``train``: recipes, the form, checks while one types, what the run needs, and its start.

The YAML is the truth: the form edits it, it is what is checked, and it is what the run gets.
"""

from __future__ import annotations

import re
import shlex
import time
from pathlib import Path
from typing import Annotated, Any

from fastapi import APIRouter, Query
from pydantic import Field, StrictBool, StrictFloat, StrictInt, StrictStr

from gym_fed.base.downloads.offer import offer_model
from gym_fed.base.modeling.weight_count import count_stored_weights
from gym_fed.config.recipes import get_recipe, recipes, relocated
from gym_fed.config.schema.base import StrictModel
from gym_fed.config.train.defaults import LARGE, ROW_KEYS, method_defaults
from gym_fed.config.train.training import TrainingConfig
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.core.files import write_atomically
from gym_fed.training.run.folder_lock import is_held
from gym_fed.web.app import Changing, Looking
from gym_fed.webui.plain import plain, text
from gym_fed.webui.run_detail import CONFIGS_NAME, is_at_work
from gym_fed.webui.train_check import MAX_CHARACTERS, given, leaving, marks_of, missing, problems_of, read
from gym_fed.webui.train_form import form
from gym_fed.webui.train_inputs import input_problems
from gym_fed.webui.train_plan import Planner
from gym_fed.webui.workbench import Workbench, resolved
from gym_fed.webui.yaml_edit import with_value

Yaml = Annotated[str, Field(max_length=MAX_CHARACTERS)]


class _YamlText(StrictModel):
    text: Yaml


class _FormEdit(StrictModel):
    text: Yaml
    key: str = Field(pattern=r"^[A-Za-z_]\w*(\.[A-Za-z_]\w*)?$", max_length=120)
    value: StrictBool | StrictInt | StrictFloat | StrictStr | None = None
    """None takes the key out, so that its default holds."""


class _StartRequest(StrictModel):
    text: Yaml
    yes: bool = False
    """Whether the person agreed to the download that was offered."""
    overwrite: bool = False


class _ModelName(StrictModel):
    name: str = Field(max_length=200)


def routes(workbench: Workbench) -> APIRouter:
    """``train`` and what is below it."""
    found, planner = APIRouter(prefix="/train"), Planner(workbench)

    @found.get("/recipes/{name}")
    def recipe(
        name: str, visitor: Looking, size: Annotated[str | None, Query(max_length=40)] = None
    ) -> dict[str, Any]:
        """The YAML of a recipe."""
        chosen = get_recipe(name)
        # Its rows stay where the package has them, unless this is the folder that it is written for.
        file = chosen.file
        is_here = file.is_relative_to(workbench.folder)
        yaml_text, _ = relocated(chosen, file.relative_to(workbench.folder) if is_here else file, size=size)
        return {"name": chosen.name, "text": yaml_text}

    @found.get("/form")
    def fields(visitor: Looking) -> dict[str, Any]:
        """The form: every key of the schema; and the recipes."""
        offered = [{"name": r.name, "summary": r.summary, "sizes": list(r.sizes)} for r in recipes()]
        return {**form(), "recipes": offered}

    @found.post("/edit")
    def edit(wanted: _FormEdit, visitor: Changing) -> dict[str, Any]:
        """The text with one value changed."""
        return {"text": with_value(wanted.text, tuple(wanted.key.split(".")), wanted.value)}

    @found.post("/check")
    def check(wanted: _YamlText, visitor: Changing) -> dict[str, Any]:
        """Problems, notes and values of a text, and what its run would do: ``checked``'s answer."""
        return checked(workbench, wanted.text)

    @found.post("/plan")
    def plan(wanted: _YamlText, visitor: Changing) -> dict[str, Any]:
        """`gym train --plan --json` of a text."""
        return planner.plan(wanted.text)

    @found.post("/offer")
    def offer(wanted: _ModelName, visitor: Changing) -> dict[str, Any]:
        """What would be fetched for a model, and how large it is."""
        made = offer_model(wanted.name)
        return {"name": text(made.name), "describe": text(made.describe()), "bytes": made.missing_bytes}

    @found.post("/start")
    def start(wanted: _StartRequest, visitor: Changing) -> dict[str, Any]:
        """Start the run: its path, its job and its command."""
        return started(workbench, wanted)

    return found


def checked(workbench: Workbench, yaml_text: str) -> dict[str, Any]:
    """What a page shows of a text: ``{problems, notes, given, chosen, leaves, missing, path, taken}``."""
    answer: dict[str, Any] = {
        "problems": [],
        "notes": [],
        "given": given(yaml_text),
        "chosen": [],
        "leaves": [],
        "missing": [],
        "path": "",
        "taken": "",
    }
    try:
        config, answer["notes"] = read(yaml_text)
        answer["chosen"] = _chosen(config)
        answer["path"] = path_below_runs(workbench, str(config.output_dir))
        answer["taken"] = _taken(workbench, answer["path"])
        answer["missing"] = missing(config)
        answer["leaves"] = leaving(config)
        answer["problems"] = input_problems(workbench, config, marks_of(yaml_text))
    except GymError as error:
        answer["problems"] = problems_of(error, yaml_text)
    return answer


def _chosen(config: TrainingConfig) -> list[dict[str, Any]]:
    """Defaults for the model that the config names, if it is on this machine: ``[{key, value, reason}]``."""
    weights = None if config.model is None else count_stored_weights(config.model)
    found = [] if weights is None else method_defaults(config, weights)
    chosen = [{"key": one.key, "value": plain(one.value), "reason": one.reason} for one in found]
    if weights is not None and weights > LARGE:
        open_keys = (key for key in ROW_KEYS if key not in config.model_fields_set)
        chosen += [
            {"key": key, "value": "by the rows", "reason": "chosen when the run starts"} for key in open_keys
        ]
    return chosen


def started(workbench: Workbench, wanted: _StartRequest) -> dict[str, Any]:
    """Write the YAML and start the run: ``{path, job}``.

    Raises:
        GymError: For a text that is refused; ``FILE_EXISTS`` where a finished run is; ``STATE_LOCKED``.
    """
    config, _ = read(wanted.text)
    path = path_below_runs(workbench, str(config.output_dir))
    folder, taken = workbench.runs / path, _taken(workbench, path)
    if taken == "running":
        raise GymError(ErrorCode.STATE_LOCKED, f"{path}: a run is at work there", "choose another output_dir")
    if taken == "finished" and not wanted.overwrite:
        raise GymError(
            ErrorCode.FILE_EXISTS,
            f"{path}: holds a finished run",
            "choose another output_dir, or overwrite it",
        )
    if (unknown := missing(config)) and not wanted.yes:
        raise GymError(
            ErrorCode.MODEL_NOT_FOUND,
            f"{', '.join(unknown)}: not on this machine",
            "agree to the download first",
        )
    file = kept_text(workbench, path, wanted.text)
    command = ["gym", "train", workbench.named(file)]
    command += ["--overwrite"] if wanted.overwrite and taken else []
    command += ["--yes"] if wanted.yes else []
    job = workbench.jobs.start(command, title=f"train {path}", folder=folder)
    return {"path": path, "job": job.facts(), "command": shlex.join(command)}


def kept_text(workbench: Workbench, path: str, yaml_text: str) -> Path:
    """Write the text of a run or a search to a file of its own, which stays.

    Args:
        workbench: Below whose folder of runs it is written.
        path: Of the run, which names the file.
        yaml_text: As it is checked.
    """
    name = re.sub(r"[^\w.-]+", "-", path.rpartition("/")[2]) or "run"
    file = workbench.runs / CONFIGS_NAME / f"{time.strftime('%Y%m%d-%H%M%S')}-{name}.yaml"
    write_atomically(file, yaml_text.encode("utf-8", "replace"))
    return file


def path_below_runs(workbench: Workbench, output_dir: str) -> str:
    """Where a run will be, below the folder of runs.

    Raises:
        GymError: ``CONFIG_INVALID`` for another place, whose runs the pages would not show.
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
            "give a folder below it, or start gym webui with another --runs",
        )
    return folder.relative_to(workbench.runs).as_posix()


def _taken(workbench: Workbench, path: str) -> str:
    """What is at the place of a run: ``running``, ``finished``, ``unfinished``, or nothing."""
    folder = workbench.runs / path
    if (folder / "result.json").exists():
        return "finished"  # its process may still be ending
    if is_held(folder) or is_at_work(folder, workbench.jobs):
        return "running"
    return "unfinished" if (folder / "run.json").exists() else ""
