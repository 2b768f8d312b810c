"""Load evaluation tasks by name with definitions and rows, refusing incomplete ones before a model is loaded.

    for task in tasks_of(["tiny", "arc_easy", "my_task.yaml"], data=Path("sets"), limit=200):
        task.config   # of the harness's ConfigurableTask

Nothing here uses a network, and ``lm_eval`` is not imported.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.evaluation.suites import grading
from gym_fed.evaluation.suites.definitions import members
from gym_fed.evaluation.suites.eval_task import EvalTask, eval_task, used_splits
from gym_fed.evaluation.suites.own_file import TaskFile, read_task_file, read_task_rows
from gym_fed.evaluation.suites.rendering import TEMPLATES
from gym_fed.evaluation.suites.row_files import Row, TaskRows
from gym_fed.evaluation.suites.store import (
    MetricNeeds,
    Places,
    TaskEntry,
    evals_home,
    listing,
    read_lock,
    require_folder,
    unknown_task,
)

_LANGUAGES = {
    "eng_Latn": "English",
    "deu_Latn": "German",
    "fra_Latn": "French",
    "spa_Latn": "Spanish",
    "swh_Latn": "Swahili",
    "hin_Deva": "Hindi",
}


def tasks_of(
    names: Sequence[str],
    data: Path | None = None,
    limit: int | None = None,
    *,
    num_fewshot: int | None = None,
    home: Path | None = None,
    graded: bool = True,
) -> list[EvalTask]:
    """Return the tasks with the given names, in their order and without duplicates.

    Args:
        names: Names of suites, groups and tasks of ``gym eval list``, and paths of task files (``.yaml``).
        data: A folder of evaluation sets in the layout of their authors, of the Hub, or of ``gym eval fetch``. It is
            searched before the fetched sets.
        limit: Maximum number of rows of each task.
        num_fewshot: Examples in each prompt, overriding the definition unless that is 0.
        home: The folder of fetched sets; by default ``$GYM_HOME/evals``.
        graded: True if answers will be graded, which may need more packages; False if only the rows are read.

    Raises:
        GymError: ``USAGE`` for an unknown name, with the nearest ones; ``UNAVAILABLE`` for all sets that are not on
            this machine, with the command that fetches them; ``MISSING_DEPENDENCY`` for a task whose metric lacks a
            requirement; ``CONFIG_INVALID`` for a task file; ``DATA_INVALID`` for rows that do not fit the definition;
            ``HASH_MISMATCH`` for a fetched file that changed.
    """
    if limit is not None and limit < 1:
        raise GymError(ErrorCode.USAGE, f"limit {limit} evaluates nothing", "set it to at least 1")
    if not names:
        raise GymError(ErrorCode.USAGE, "no task was given", "choose a suite: `gym eval list` prints them")
    if data is not None:
        require_folder(data)
    where = home or evals_home()
    places = Places(data, where, read_lock(where))
    tasks: dict[str, EvalTask] = {}
    missing: dict[str, str] = {}
    grades: set[str] = set()
    for job in _jobs(names):
        if job.name in tasks:
            continue
        definition = _with_examples(job.definition, num_fewshot)
        spec = job.spec(definition, places, limit)
        if spec is None:
            missing.setdefault(job.entry_name, job.dataset)
            continue
        if job.grade is not None:
            grades.add(job.grade)
        tasks[spec.name] = spec
    if missing:
        raise _unavailable(missing, data)
    for grade in sorted(grades) if graded else ():
        grading.check(grade)
    return list(tasks.values())


@dataclass(frozen=True)
class _RegistryTask:
    """A task of the registry."""

    name: str
    entry_name: str
    entry: TaskEntry
    subset: str | None
    definition: Mapping[str, Any]

    @property
    def dataset(self) -> str:
        return str(self.entry.dataset)

    @property
    def grade(self) -> str | None:
        grade: str | None = self.definition["grade"]
        return grade

    def spec(self, definition: dict[str, Any], places: Places, limit: int | None) -> EvalTask | None:
        """Return the task; None if its rows are not on this machine."""
        require(self.name, self.entry.needs)
        only = definition.pop("only", None)
        rows = self.rows(places, used_splits(definition))
        if rows is None:
            return None
        if only is not None:
            only_rows = {
                split: [row for row in split_rows if row["task"] == only]
                for split, split_rows in rows.splits.items()
            }
            rows = replace(rows, splits=only_rows)
        if self.grade == "mbpp":
            # The harness's file with these examples imports a metric that needs a network.
            examples = [{**row, "is_fewshot": True} for row in rows.splits["prompt"]]
            definition["fewshot_config"] = {"sampler": "first_n", "samples": examples}
        licence = listing().datasets[self.dataset].licence
        return eval_task(self.name, self.entry_name, definition, rows, licence, limit)

    def rows(self, places: Places, splits: list[str]) -> TaskRows | None:
        """Return the rows of these splits; None if they are not on this machine."""
        entry = listing().datasets[self.dataset]
        if self.entry.each != "pair":
            fetched = [split for split in splits[1:] if split in entry.splits]
            examples = ["prompt"] if self.grade == "mbpp" else []
            return places.rows(self.dataset, entry, self.subset, [splits[0], *fetched, *examples])
        sides = [
            places.rows(self.dataset, entry, language, splits) for language in str(self.subset).split("-")
        ]
        if any(side is None for side in sides):
            return None
        first, second = (side for side in sides if side is not None)
        pairs = {
            split: _paired(str(self.subset), first.splits[split], second.splits[split]) for split in splits
        }
        return TaskRows(pairs, first.source, first.partial)


@dataclass(frozen=True)
class _OwnJob:
    """A custom task file."""

    name: str
    file: Path
    task: TaskFile
    entry_name: str = ""
    dataset: str = ""

    @property
    def grade(self) -> str | None:
        return self.task.grade

    @property
    def definition(self) -> Mapping[str, Any]:
        return {**dict.fromkeys(TEMPLATES), **self.task.definition(), "grade": self.task.grade}

    def spec(self, definition: dict[str, Any], places: Places, limit: int | None) -> EvalTask | None:
        rows = TaskRows(read_task_rows(self.file, self.task), str(self.file))
        return eval_task(self.name, self.name, definition, rows, "own", limit, is_own=True)


def _jobs(names: Sequence[str]) -> Iterator[_RegistryTask | _OwnJob]:
    known = listing()
    for name in names:
        if name.endswith((".yaml", ".yml")):
            file = Path(name).expanduser()
            task = read_task_file(file)
            if task.task in known.tasks or task.task in known.suites:
                raise GymError(
                    ErrorCode.CONFIG_INVALID,
                    f"{file}: task: {task.task!r} is already the name of a built-in suite or task",
                    "rename your task",
                )
            yield _OwnJob(task.task, file, task)
        elif name in known.suites or name in known.tasks:
            for entry_name in known.entries(name):
                yield from _tasks_of_entry(entry_name)
        else:
            yield _single(name)


def _tasks_of_entry(entry_name: str) -> Iterator[_RegistryTask]:
    entry = listing().tasks[entry_name]
    for name, (subset, definition) in members(entry_name).items():
        yield _RegistryTask(name, entry_name, entry, subset, definition)


def _single(name: str) -> _RegistryTask:
    """Return a member of a group, such as one subject of MMLU."""
    groups = [key for key, entry in listing().tasks.items() if not entry.tasks]
    jobs = {job.name: job for group in groups for job in _tasks_of_entry(group)}
    if name not in jobs:
        raise unknown_task(name, jobs)
    return jobs[name]


def _with_examples(definition: Mapping[str, Any], num_fewshot: int | None) -> dict[str, Any]:
    """Return a copy of a definition with the number of examples; a definition with 0 keeps 0."""
    changed = num_fewshot is not None and definition.get("num_fewshot") != 0
    return {**definition, "num_fewshot": num_fewshot} if changed else dict(definition)


def _paired(pair: str, first: Sequence[Row], second: Sequence[Row]) -> list[Row]:
    """Join the sentences of two languages by id."""
    source, _, target = pair.partition("-")
    texts = {row["id"]: row["text"] for row in second}
    return [
        {
            "id": row["id"],
            "from_name": _LANGUAGES[source],
            "from_text": row["text"],
            "to_name": _LANGUAGES[target],
            "to_text": texts[row["id"]],
        }
        for row in first
        if row["id"] in texts
    ]


def _unavailable(missing: Mapping[str, str], data: Path | None) -> GymError:
    sets = listing().datasets
    shown = [f"{name} ({sets[name].hub}, {sets[name].licence})" for name in dict.fromkeys(missing.values())]
    looked = f" or in {data}" if data is not None else ""
    return GymError(
        ErrorCode.UNAVAILABLE,
        f"evaluation sets not found on this machine{looked}: {', '.join(shown)}",
        f"fetch them: gym eval fetch {' '.join(missing)}; or pass a folder that has them with --data; "
        "or choose tasks that are on this machine: `gym eval list` shows which",
    )


def is_here(entry_name: str, places: Places) -> tuple[bool, str]:
    """Return True if all rows of an entry are on this machine, and the differences from the full set.

    Raises:
        GymError: Errors of ``tasks_of``, except for missing sets.
    """
    entry = listing().tasks[entry_name]
    if listing().datasets[str(entry.dataset)].package is not None:
        return True, ""
    partial = ""
    for job in _tasks_of_entry(entry_name):
        rows = job.rows(places, used_splits(job.definition))
        if rows is None:
            return False, ""
        partial = partial or rows.partial
    return True, partial


def missing_needs(needs: MetricNeeds) -> list[str]:
    """Describe which of ``needs`` are missing on this machine."""
    missing = [f"the package {name}" for name in needs.packages if importlib.util.find_spec(name) is None]
    if needs.nltk is not None and not any((folder / needs.nltk).is_dir() for folder in _nltk_folders()):
        missing.append(f"NLTK's {needs.nltk}")
    return missing


def require(task: str, needs: MetricNeeds) -> None:
    """Refuse a task whose metric cannot run on this machine.

    Raises:
        GymError: ``MISSING_DEPENDENCY`` with what to install.
    """
    missing = missing_needs(needs)
    if not missing:
        return
    resource = (needs.nltk or "").rpartition("/")[2]
    raise GymError(
        ErrorCode.MISSING_DEPENDENCY,
        f"task {task}: its metric needs {', '.join(missing)}, which would otherwise download missing data",
        f"where there is a network: pip install {' '.join(needs.packages)} && python -m nltk.downloader {resource}; "
        "set NLTK_DATA to the folder where it is stored",
    )


def _nltk_folders() -> list[Path]:
    """Return the folders that NLTK searches, according to its documentation."""
    named = [Path(part) for part in os.environ.get("NLTK_DATA", "").split(os.pathsep) if part]
    prefix = Path(sys.prefix)
    inside = [prefix / "nltk_data", prefix / "share" / "nltk_data", prefix / "lib" / "nltk_data"]
    system = [
        Path(root) / "nltk_data" for root in ("/usr/share", "/usr/local/share", "/usr/lib", "/usr/local/lib")
    ]
    return [*named, Path("~/nltk_data").expanduser(), *inside, *system]
