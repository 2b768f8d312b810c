"""What the screen ``evals`` shows of records: their list, one with its figures and samples, and two compared."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.core.text import plain
from gym_fed.evaluation.compare import compare_results
from gym_fed.evaluation.groups import groups_of, with_groups
from gym_fed.evaluation.records.document import RecordDocument
from gym_fed.evaluation.records.listing import brief_figures_of, documents_of, record_paths
from gym_fed.evaluation.records.reader import named_record, read_record
from gym_fed.evaluation.results import EvalResults, SampleResult, TaskResult

Z_95 = 1.959964
"""Standard errors to either side that hold 95% of a normal distribution."""
MAX_RECORDS = 200
MAX_TASKS = 500
ROOM = 4000
"""Characters of each text of a sample."""
_CHOICES = 20
_KEPT = 3

Request = dict[str, Any]
Answer = dict[str, Any]


class RecordViews:
    """Answers requests, one after the other.

    Args:
        folder: Below which the folders of records are.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._read: OrderedDict[tuple[Path, int], EvalResults] = OrderedDict()

    def answer(self, request: Request) -> Answer:
        """What ``request["view"]`` names.

        Raises:
            GymError: Of a record that is missing or damaged.
        """
        views = {
            "list": self._list,
            "record": self._record,
            "samples": self._samples,
            "compare": self._compare,
        }
        return views[request["view"]](request)

    def _list(self, request: Request) -> Answer:
        paths = record_paths(self._folder / request["folder"])
        paths.sort(key=lambda path: path.stat().st_mtime, reverse=True)
        rows: list[Answer] = []
        problems: list[str] = []
        for path, document in documents_of(paths[:MAX_RECORDS]):
            if isinstance(document, GymError):
                problems.append(str(document)[:500])
            else:
                rows.append(_brief(path, document))
        return {"records": rows, "problems": problems[:20], "total": len(paths)}

    def _record(self, request: Request) -> Answer:
        path, results = self._results(request, request["record"])
        tasks = with_groups(results, groups_of(results.tasks)).tasks
        return {
            "id": path.stem,
            "model": plain(results.model),
            "seconds": results.seconds,
            "identity": {key: plain(value, 100) for key, value in results.identity.items()},
            "tasks": [
                _task(task, name not in results.tasks) for name, task in list(tasks.items())[:MAX_TASKS]
            ],
            "total": len(tasks),
        }

    def _samples(self, request: Request) -> Answer:
        """Samples of a task from ``start`` on, of those that are right or wrong, or hold words."""
        _, results = self._results(request, request["record"])
        task = results.tasks.get(request["task"])
        if task is None:
            raise GymError(ErrorCode.NOT_FOUND, f"the record has no task {plain(request['task'], 60)}")
        words = request["text"].casefold()
        found = [
            sample
            for sample in task.samples
            if (not request["only"] or _is_right(task, sample) == (request["only"] == "right"))
            and (not words or words in f"{sample.prompt}\n{sample.answer}\n{sample.target}".casefold())
        ]
        shown = found[request["start"] : request["start"] + request["limit"]]
        return {"samples": [_sample(task, sample) for sample in shown], "total": len(found)}

    def _compare(self, request: Request) -> Answer:
        (_, first), (_, second) = (self._results(request, request[name]) for name in ("first", "second"))
        compared = compare_results(first, second, shared_only=True)
        found = asdict(compared)
        found["tasks"] = list(found["tasks"].values())[:MAX_TASKS]
        return {**found, "first": plain(compared.first), "second": plain(compared.second)}

    def _results(self, request: Request, record: str) -> tuple[Path, EvalResults]:
        path = named_record(record, self._folder / request["folder"])
        key = (path, path.stat().st_mtime_ns)
        if key not in self._read:
            self._read[key] = read_record(path)
            while len(self._read) > _KEPT:
                self._read.popitem(last=False)
        return path, self._read[key]


def _brief(path: Path, document: RecordDocument) -> Answer:
    figures = [asdict(one) for one in brief_figures_of(document)]
    return {
        "id": path.stem,
        "model": plain(document.model_info.name),
        "at": path.stat().st_mtime,
        "figures": figures[:8],
        "num_figures": len(figures),
        "samples": document.detailed_evaluation_results.total_rows,
    }


def _task(task: TaskResult, is_group: bool) -> Answer:
    return {
        "task": task.task,
        "num_fewshot": task.num_fewshot,
        "main_metric": task.main_metric,
        "is_group": is_group,
        "figures": {metric: _figure(task, metric) for metric in task.figures},
    }


def _figure(task: TaskResult, metric: str) -> Mapping[str, Any]:
    figure = task.figures[metric]
    values = [sample.metrics.get(metric) for sample in task.samples]
    bounds: tuple[float, float] | None = None
    if values and all(value in (0.0, 1.0) for value in values):
        bounds = wilson_interval(figure.value, len(values))
    elif figure.stderr is not None:
        bounds = (figure.value - Z_95 * figure.stderr, figure.value + Z_95 * figure.stderr)
    return {**asdict(figure), "interval": bounds}


def wilson_interval(share: float, n: int) -> tuple[float, float]:
    """The 95% interval of a share of ``n`` rows, which also holds where none or all are right.

    Wilson 1927, "Probable inference, the law of succession, and statistical inference".
    """
    z = Z_95 * Z_95 / n
    middle = (share + z / 2) / (1 + z)
    room = math.sqrt(share * (1 - share) * z + z * z / 4) / (1 + z)
    return max(0.0, middle - room), min(1.0, middle + room)


def _is_right(task: TaskResult, sample: SampleResult) -> bool:
    """Whether the main metric of the task is 1 for it."""
    return sample.metrics.get(task.main_metric, 0.0) >= 1.0


def _sample(task: TaskResult, sample: SampleResult) -> Answer:
    choices = [
        {"text": plain(choice, 500), "logprob": logprob}
        for choice, logprob in zip(sample.choices, sample.logprobs, strict=False)
    ]
    return {
        "number": sample.number,
        "prompt": sample.prompt[-ROOM:],
        "prompt_more": max(0, len(sample.prompt) - ROOM),
        "answer": None if sample.answer is None else sample.answer[:ROOM],
        "target": sample.target[:ROOM],
        "choices": choices[:_CHOICES],
        "is_right": _is_right(task, sample),
        "metrics": dict(sample.metrics),
        "cut": sample.cut,
    }
