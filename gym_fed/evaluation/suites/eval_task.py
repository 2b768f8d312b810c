"""A task for the harness: its validated definition, its rows and metric, and its digest."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

from gym_fed.core.bounded.patterns import BOUNDED_REGEX
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.evaluation.suites import grading
from gym_fed.evaluation.suites.definitions import named, resolved
from gym_fed.evaluation.suites.rendering import TEMPLATES, require_rendering, sandboxed, value_of
from gym_fed.evaluation.suites.row_files import Row, TaskRows, rows_sha256

_RENDERED_ROWS = 8
_SPLITS = ("training_split", "validation_split", "test_split", "fewshot_split")

Kind = Literal["choices", "text", "code", "schema", "translation"]


@dataclass(frozen=True)
class EvalTask:
    """A task with all its rows on this machine.

    Attributes:
        name: The name in the harness or the registry.
        group: The registry entry that the task belongs to; the task's own name if it is in no group.
        config: Argument of the harness's ``ConfigurableTask(config=...)``: functions are loaded, ``custom_dataset``
            returns the rows of ``lock``, and missing splits are None.
        lock: SHA-256 of the definition and the rows, without ``limit``; it must match to reproduce a result.
        kind: The scoring of answers.
        metric: The task's first metric.
        licence: The licence of the rows (SPDX); ``own`` for a custom file.
        source: The origin of the rows.
        partial: The differences from the full set; empty if there are none.
        limit: Maximum number of rows to evaluate; None for all.
        split: Name of the evaluated split.
        rows: The rows by split; ``rows[split]`` are evaluated, the others are examples.
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
        """The number of evaluated rows."""
        return len(self.rows[self.split][: self.limit])


def used_splits(definition: Mapping[str, Any]) -> list[str]:
    """Return the evaluated split and the split of examples, if there is one."""
    evaluated = definition.get("test_split") or definition.get("validation_split")
    pool = definition.get("fewshot_split") or definition.get("training_split")
    given = (definition.get("fewshot_config") or {}).get("samples")
    splits = [evaluated, pool] if definition.get("num_fewshot") and given is None else [evaluated]
    return [str(split) for split in dict.fromkeys(splits) if split is not None]


def eval_task(
    name: str,
    group: str,
    definition: dict[str, Any],
    task_rows: TaskRows,
    licence: str,
    limit: int | None,
    *,
    is_own: bool = False,
) -> EvalTask:
    splits = used_splits(definition)
    if empty := [split for split in splits if not task_rows.splits.get(split)]:
        more = f" ({task_rows.partial})" if task_rows.partial else ""
        raise GymError(
            ErrorCode.DATA_INVALID,
            f"task {name}: {task_rows.source}: the split {empty[0]!r} has no rows{more}",
            "use the whole set" if empty[0] == splits[0] else "evaluate without examples: num_fewshot 0",
        )
    split, used = splits[0], {key: task_rows.splits[key] for key in splits}
    lock = _digest({"definition": named(definition), "rows": {key: rows_sha256(used[key]) for key in used}})
    grade = definition.pop("grade", None)
    if grade is not None:
        _use_built_in_metric(definition, grade)
    config = resolved(definition)
    if not is_own:  # the rows of an own file were rendered in the child process
        require_rendering(name, config, _processed(config, used[split][:_RENDERED_ROWS])[:_RENDERED_ROWS])
    has_choices = config.get("doc_to_choice") is not None
    if grade is not None:
        target = config["doc_to_target"]
        target_of = (
            sandboxed("doc_to_target", target, has_choices)
            if is_own
            else partial(value_of, "doc_to_target", target, has_choices=has_choices)
        )
        config["process_results"] = grading.process_results(grade, target_of)
    if is_own:
        config.update({key: sandboxed(key, config[key], has_choices) for key in TEMPLATES})
        for entry in config.get("filter_list") or ():
            for step in entry["filter"]:
                if step["function"] == "regex":
                    step["function"] = BOUNDED_REGEX
    for key in _SPLITS:
        if config.get(key) not in used:
            config[key] = None
    config.update(
        task=name, dataset_path="json", dataset_name=None, dataset_kwargs={}, custom_dataset=_table(used)
    )
    metrics = config.get("metric_list") or [{"metric": "acc"}]
    version = (config.get("metadata") or {}).get("version", 1)
    return EvalTask(
        name=name,
        group=group,
        version=str(version),
        config=config,
        lock=lock,
        kind=_kind(config, grade),
        metric=str(metrics[0]["metric"]),
        licence=licence,
        source=task_rows.source,
        partial=task_rows.partial,
        limit=limit,
        split=split,
        rows=used,
    )


def _processed(config: Mapping[str, Any], rows: Sequence[Row]) -> list[Row]:
    """Apply the definition's ``process_docs`` to rows."""
    if config.get("process_docs") is None:
        return list(rows)
    from datasets import Dataset

    return [dict(row) for row in config["process_docs"](Dataset.from_list(list(rows)))]


def _use_built_in_metric(definition: dict[str, Any], grade: str) -> None:
    """Replace the definition's metric, whose functions are then never loaded."""
    metric = {"metric": grading.GRADES[grade], "aggregation": "mean", "higher_is_better": True}
    definition["metric_list"] = [metric]
    for key in ("filter_list", "unsafe_code", "process_results"):
        definition.pop(key, None)


def _table(rows: Mapping[str, Sequence[Row]]) -> Callable[..., Any]:
    """Return rows through the harness's ``custom_dataset`` hook, which avoids writing a cache."""

    def dataset(**_: Any) -> Any:
        from datasets import Dataset, DatasetDict

        return DatasetDict({split: Dataset.from_list(list(split_rows)) for split, split_rows in rows.items()})

    return dataset


def _kind(config: Mapping[str, Any], grade: str | None) -> Kind:
    if grade is not None:
        kinds: dict[str, Kind] = {"json_schema": "schema", "chrf": "translation"}
        return kinds.get(grade, "code")
    return "choices" if config.get("output_type") == "multiple_choice" else "text"


def _digest(value: Any) -> str:
    text = json.dumps(value, sort_keys=True, ensure_ascii=False, separators=(",", ":"), default=str)
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()
