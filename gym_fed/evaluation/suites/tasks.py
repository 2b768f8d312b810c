"""Tasks by name, with their definition and rows, ready for the harness: what is missing is refused before any model.

    for task in tasks_of(["tiny", "arc_easy", "my_task.yaml"], data=Path("sets"), limit=200):
        task.config   # of the harness's ConfigurableTask

Nothing here uses a network, and ``lm_eval`` is not imported.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any, Literal

from gym_fed.errors import ErrorCode, GymError
from gym_fed.evaluation.suites import grading
from gym_fed.evaluation.suites.data import Places, TaskRows, require_folder
from gym_fed.evaluation.suites.definitions import harness_files, named, read_definition, resolved
from gym_fed.evaluation.suites.listing import ASSETS, TaskEntry, listing, unknown_task
from gym_fed.evaluation.suites.needs import require
from gym_fed.evaluation.suites.own_file import TaskFile, read_task_file, read_task_rows
from gym_fed.evaluation.suites.rendering import refuse, sandboxed, value_of
from gym_fed.evaluation.suites.row_files import Row, rows_sha256
from gym_fed.evaluation.suites.store import evals_home, read_lock

_RENDERED_ROWS = 8
_SPLITS = ("training_split", "validation_split", "test_split", "fewshot_split")
_TEMPLATES = ("doc_to_text", "doc_to_target", "doc_to_choice")
_LANGUAGES = {
    "eng_Latn": "English",
    "deu_Latn": "German",
    "fra_Latn": "French",
    "spa_Latn": "Spanish",
    "swh_Latn": "Swahili",
    "hin_Deva": "Hindi",
}

Kind = Literal["choices", "text", "code", "schema", "translation"]


@dataclass(frozen=True)
class TaskSpec:
    """One task, all of whose rows are here.

    Attributes:
        name: As the harness or we call it.
        group: The entry of the registry that it belongs to; its own name for a task that stands alone.
        version: Of the definition, as its author counts.
        config: For the harness's ``ConfigurableTask(config=...)``: functions are loaded, ``custom_dataset`` gives the
            rows that ``lock`` is of, splits that are not here are None.
        lock: sha256 of definition and rows: what another must have to reproduce it. ``limit`` is not in it.
        kind: How an answer is judged.
        metric: The task's first metric.
        licence: Of the rows, SPDX; ``own`` for a file of one's own.
        source: Where the rows came from.
        partial: What differs from the whole set; empty for the whole.
        limit: Most rows to evaluate; None for all.
        split: The one that is evaluated.
        rows: By split, as read; ``rows[split]`` are evaluated, the others are examples.
    """

    name: str
    group: str
    version: str
    config: Mapping[str, Any] = field(repr=False)
    lock: str
    kind: Kind
    metric: str
    licence: str
    source: str
    partial: str
    limit: int | None
    split: str
    rows: Mapping[str, Sequence[Row]] = field(repr=False)

    @property
    def num_rows(self) -> int:
        """How many are evaluated."""
        whole = len(self.rows[self.split])
        return whole if self.limit is None else min(self.limit, whole)


def tasks_of(
    names: Sequence[str],
    data: Path | None = None,
    limit: int | None = None,
    *,
    num_fewshot: int | None = None,
    home: Path | None = None,
) -> list[TaskSpec]:
    """The tasks that names stand for, each once, in the order of the names.

    Args:
        names: Of suites, groups and tasks of ``gym eval list``, and paths of task files (``.yaml``).
        data: A folder of evaluation sets as they lie there: as published, as the Hub has them, or as ``gym eval fetch``
            writes them. It is looked at before what was fetched.
        limit: Most rows of each task.
        num_fewshot: Examples of every prompt, instead of what a definition says; one that says 0 keeps 0.
        home: Of the fetched sets; by default ``$GYM_HOME/evals``.

    Raises:
        GymError: ``USAGE`` for an unknown name, with the nearest ones; ``UNAVAILABLE`` for all sets that are not on
            this machine, with the command that fetches them; ``MISSING_DEPENDENCY`` for a task whose metric needs what
            is not here; ``CONFIG_INVALID`` for a task file; ``DATA_INVALID`` for rows that do not fit the definition;
            ``HASH_MISMATCH`` for a fetched file that changed.
    """
    if limit is not None and limit < 1:
        raise GymError(ErrorCode.USAGE, f"limit {limit}: evaluates nothing", "give at least 1")
    if not names:
        raise GymError(ErrorCode.USAGE, "no task is named", "name a suite: `gym eval list` shows them")
    if data is not None:
        require_folder(data)
    where = home or evals_home()
    places = Places(data, where, read_lock(where))
    found: dict[str, TaskSpec] = {}
    missing: dict[str, str] = {}
    grades: set[str] = set()
    for job in _jobs(names):
        if job.name in found:
            continue
        definition = _with_examples(job.definition, num_fewshot)
        spec = job.spec(definition, places, limit)
        if spec is None:
            missing.setdefault(job.entry_name, job.dataset)
            continue
        if job.grade is not None:
            grades.add(job.grade)
        found[spec.name] = spec
    if missing:
        raise _unavailable(missing, data)
    for grade in sorted(grades):
        grading.check(grade)
    return list(found.values())


def members(entry_name: str) -> dict[str, tuple[str | None, Mapping[str, Any]]]:
    """Of an entry of the registry: name, subset and definition of each task, functions not loaded.

    Raises:
        GymError: ``MISSING_DEPENDENCY`` where the definitions are the harness's and it is not installed.
    """
    return dict(_members(entry_name))


@cache
def _members(entry_name: str) -> dict[str, tuple[str | None, Mapping[str, Any]]]:
    entry = listing().tasks[entry_name]
    if entry.file is not None:
        task = read_task_file(ASSETS / entry.file)
        definition = {**task.definition(), "grade": task.grade}
        if entry.each == "task":
            names = dict.fromkeys(row["task"] for row in _package_rows(entry))
            return {f"{entry.dataset}_{name}": (entry.subset, {**definition, "only": name}) for name in names}
        if entry.each == "pair":
            return {f"{entry_name}_{pair}": (pair, definition) for pair in entry.pairs}
        return {entry_name: (entry.subset, definition)}
    assert entry.harness is not None
    files = harness_files(entry.harness)
    if not files:
        raise GymError(
            ErrorCode.MISSING_DEPENDENCY,
            f"{entry_name}: the installed lm-evaluation-harness has no {entry.harness}",
            "install the one that gym-fed is tried with: pip install 'gym-fed[eval]'",
        )
    made: dict[str, tuple[str | None, Mapping[str, Any]]] = {}
    for file in files:
        definition = {**read_definition(file), "grade": entry.grade}
        subset = entry.subset if "subset" in entry.model_fields_set else definition.get("dataset_name")
        made[str(definition["task"])] = (subset, definition)
    return made


def _package_rows(entry: TaskEntry) -> Sequence[Row]:
    found = Places(None, Path(), read_lock(Path("/nonexistent"))).rows(
        str(entry.dataset), listing().datasets[str(entry.dataset)], entry.subset, ["test"]
    )
    assert found is not None
    return found.splits["test"]


@dataclass(frozen=True)
class _Job:
    """One task of the registry."""

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
        found: str | None = self.definition["grade"]
        return found

    def spec(self, definition: dict[str, Any], places: Places, limit: int | None) -> TaskSpec | None:
        """The task; None where its rows are not on this machine."""
        require(self.name, self.entry.needs)
        only = definition.pop("only", None)
        rows = self._rows(places, _used_splits(definition))
        if rows is None:
            return None
        if only is not None:
            kept = {
                split: [row for row in found if row["task"] == only] for split, found in rows.splits.items()
            }
            rows = replace(rows, splits=kept)
        if self.grade == "mbpp":
            _show_examples(definition, rows)
        licence = listing().datasets[self.dataset].licence
        return _spec(self.name, self.entry_name, definition, rows, licence, limit)

    def found(self, places: Places) -> TaskRows | None:
        """The rows that it is evaluated on; None where they are not on this machine."""
        return self._rows(places, _used_splits(self.definition))

    def _rows(self, places: Places, splits: list[str]) -> TaskRows | None:
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
    """A task file of one's own."""

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
        return {**dict.fromkeys(_TEMPLATES), **self.task.definition(), "grade": self.task.grade}

    def spec(self, definition: dict[str, Any], places: Places, limit: int | None) -> TaskSpec | None:
        rows = TaskRows(read_task_rows(self.file, self.task), str(self.file))
        return _spec(self.name, self.name, definition, rows, "own", limit, is_own=True)


def _jobs(names: Sequence[str]) -> Iterator[_Job | _OwnJob]:
    known = listing()
    for name in names:
        if name.endswith((".yaml", ".yml")):
            file = Path(name).expanduser()
            task = read_task_file(file)
            if task.task in known.tasks or task.task in known.suites:
                raise GymError(
                    ErrorCode.CONFIG_INVALID,
                    f"{file}: task: {task.task!r} is a task of gym-fed",
                    "give yours another name",
                )
            yield _OwnJob(task.task, file, task)
        elif name in known.suites or name in known.tasks:
            for entry_name in known.entries(name):
                yield from _of_entry(entry_name)
        else:
            yield _single(name)


def _of_entry(entry_name: str) -> Iterator[_Job]:
    entry = listing().tasks[entry_name]
    for name, (subset, definition) in _members(entry_name).items():
        yield _Job(name, entry_name, entry, subset, definition)


def _single(name: str) -> _Job:
    """A member of a group, such as one subject of MMLU."""
    groups = [key for key, entry in listing().tasks.items() if not entry.tasks]
    jobs = {job.name: job for group in groups for job in _of_entry(group)}
    if name not in jobs:
        raise unknown_task(name, jobs)
    return jobs[name]


def _with_examples(definition: Mapping[str, Any], num_fewshot: int | None) -> dict[str, Any]:
    """A copy of a definition; a number of examples that it sets to 0 is part of what it is."""
    changed = num_fewshot is not None and definition.get("num_fewshot") != 0
    return {**definition, "num_fewshot": num_fewshot} if changed else dict(definition)


def _used_splits(definition: Mapping[str, Any]) -> list[str]:
    """The split that is evaluated, and the one that examples come from, if there are any."""
    evaluated = definition.get("test_split") or definition.get("validation_split")
    pool = definition.get("fewshot_split") or definition.get("training_split")
    given = (definition.get("fewshot_config") or {}).get("samples")
    splits = [evaluated, pool] if definition.get("num_fewshot") and given is None else [evaluated]
    return [str(split) for split in dict.fromkeys(splits) if split is not None]


def _spec(
    name: str,
    group: str,
    definition: dict[str, Any],
    found: TaskRows,
    licence: str,
    limit: int | None,
    *,
    is_own: bool = False,
) -> TaskSpec:
    splits = _used_splits(definition)
    if empty := [split for split in splits if not found.splits.get(split)]:
        more = f" ({found.partial})" if found.partial else ""
        raise GymError(
            ErrorCode.DATA_INVALID,
            f"task {name}: {found.source}: there are no rows of the split {empty[0]!r}{more}",
            "give the whole set" if empty[0] == splits[0] else "evaluate without examples: num_fewshot 0",
        )
    split, used = splits[0], {key: found.splits[key] for key in splits}
    lock = _digest({"definition": named(definition), "rows": {key: rows_sha256(used[key]) for key in used}})
    grade = definition.pop("grade", None)
    if grade is not None:
        _grade_here(definition, grade)
    config = resolved(definition)
    refuse(name, config, _processed(config, used[split][:_RENDERED_ROWS]), _RENDERED_ROWS)
    has_choices = config.get("doc_to_choice") is not None
    if grade is not None:
        target = config["doc_to_target"]
        config["process_results"] = grading.process_results(
            grade, lambda row: value_of("doc_to_target", target, row, has_choices)
        )
    if is_own:
        config.update({key: sandboxed(key, config[key], has_choices) for key in _TEMPLATES})
    for key in _SPLITS:
        if config.get(key) not in used:
            config[key] = None
    config.update(
        task=name, dataset_path="json", dataset_name=None, dataset_kwargs={}, custom_dataset=_table(used)
    )
    metrics = config.get("metric_list") or [{"metric": "acc"}]
    version = (config.get("metadata") or {}).get("version", 1)
    return TaskSpec(
        name=name,
        group=group,
        version=str(version),
        config=config,
        lock=lock,
        kind=_kind(config, grade),
        metric=str(metrics[0]["metric"]),
        licence=licence,
        source=found.source,
        partial=found.partial,
        limit=limit,
        split=split,
        rows=used,
    )


def _processed(config: Mapping[str, Any], rows: Sequence[Row]) -> list[Row]:
    """Rows as the definition's ``process_docs`` makes them."""
    if config.get("process_docs") is None:
        return list(rows)
    from datasets import Dataset

    return [dict(row) for row in config["process_docs"](Dataset.from_list(list(rows)))]


def _grade_here(definition: dict[str, Any], grade: str) -> None:
    """Our metric in the place of the definition's, whose functions are then never loaded."""
    metric = {"metric": grading.GRADES[grade], "aggregation": "mean", "higher_is_better": True}
    definition["metric_list"] = [metric]
    for key in ("filter_list", "unsafe_code", "process_results"):
        definition.pop(key, None)


def _show_examples(definition: dict[str, Any], rows: TaskRows) -> None:
    """MBPP's three examples from the data, which the harness has in a file that asks a network for its metric."""
    examples = [{**row, "is_fewshot": True} for row in rows.splits["prompt"]]
    definition["fewshot_config"] = {"sampler": "first_n", "samples": examples}


def _paired(pair: str, first: Sequence[Row], second: Sequence[Row]) -> list[Row]:
    """Sentences of two languages, joined by their id."""
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


def _table(rows: Mapping[str, Sequence[Row]]) -> Callable[..., Any]:
    """The harness's ``custom_dataset``: it calls this with the metadata, and nothing is written to a cache."""

    def dataset(**_: Any) -> Any:
        from datasets import Dataset, DatasetDict

        return DatasetDict({split: Dataset.from_list(list(found)) for split, found in rows.items()})

    return dataset


def _kind(config: Mapping[str, Any], grade: str | None) -> Kind:
    if grade is not None:
        kinds: dict[str, Kind] = {"json_schema": "schema", "chrf": "translation"}
        return kinds.get(grade, "code")
    return "choices" if config.get("output_type") == "multiple_choice" else "text"


def _digest(value: Any) -> str:
    text = json.dumps(value, sort_keys=True, ensure_ascii=False, separators=(",", ":"), default=str)
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def _unavailable(missing: Mapping[str, str], data: Path | None) -> GymError:
    sets = listing().datasets
    shown = [f"{name} ({sets[name].hub}, {sets[name].licence})" for name in dict.fromkeys(missing.values())]
    looked = f" or in {data}" if data is not None else ""
    return GymError(
        ErrorCode.UNAVAILABLE,
        f"evaluation sets that are not on this machine{looked}: {', '.join(shown)}",
        f"fetch them: gym eval fetch {' '.join(missing)}; or give a folder that has them with --data; "
        "or name the tasks that are here: `gym eval list` shows which",
    )


def is_here(entry_name: str, places: Places) -> tuple[bool, str]:
    """Whether the rows of all tasks of an entry are on this machine, and what differs from the whole set.

    Raises:
        GymError: As ``tasks_of``, but for sets that are not here.
    """
    entry = listing().tasks[entry_name]
    if listing().datasets[str(entry.dataset)].package is not None:
        return True, ""
    partial = ""
    for job in _of_entry(entry_name):
        found = job.found(places)
        if found is None:
            return False, ""
        partial = partial or found.partial
    return True, partial
