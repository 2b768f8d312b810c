"""Views of evaluation records: a list, one record with samples, and a comparison of two."""

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
from gym_fed.evaluation.records.document import RecordDocument
from gym_fed.evaluation.records.reader import (
    brief_figures_of,
    documents_of,
    named_record,
    read_record,
    record_paths,
)
from gym_fed.evaluation.results import EvalResults, SampleResult, TaskResult, groups_of, with_groups

Z_95 = 1.959964
"""The 97.5% quantile of the standard normal distribution."""
MAX_RECORDS = 200
MAX_TASKS = 500
ROOM = 4000
"""Maximum length of each text of a sample, in characters."""
_CHOICES = 20
_CACHE_SIZE = 3

Request = dict[str, Any]
Answer = dict[str, Any]


class RecordViews:
    """Answers requests for views, one at a time.

    Args:
        folder: Parent folder of the record folders.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._read: OrderedDict[tuple[Path, int], EvalResults] = OrderedDict()

    def answer(self, request: Request) -> Answer:
        """Answer the request with the view it names.

        Raises:
            GymError: If the record is missing or damaged.
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
        """Return samples of a task from index ``start``, filtered by correctness or text."""
        _, results = self._results(request, request["record"])
        task = results.tasks.get(request["task"])
        if task is None:
            raise GymError(ErrorCode.NOT_FOUND, f"the record has no task {plain(request['task'], 60)}")
        words = request["text"].casefold()
        samples = [
            sample
            for sample in task.samples
            if (not request["only"] or _is_right(task, sample) == (request["only"] == "right"))
            and (not words or words in f"{sample.prompt}\n{sample.answer}\n{sample.target}".casefold())
        ]
        shown = samples[request["start"] : request["start"] + request["limit"]]
        return {"samples": [_sample(task, sample) for sample in shown], "total": len(samples)}

    def _compare(self, request: Request) -> Answer:
        (_, first), (_, second) = (self._results(request, request[name]) for name in ("first", "second"))
        compared = compare_results(first, second, shared_only=True)
        comparison = asdict(compared)
        comparison["tasks"] = list(comparison["tasks"].values())[:MAX_TASKS]
        return {**comparison, "first": plain(compared.first), "second": plain(compared.second)}

    def _results(self, request: Request, record: str) -> tuple[Path, EvalResults]:
        path = named_record(record, self._folder / request["folder"])
        key = (path, path.stat().st_mtime_ns)
        if key not in self._read:
            self._read[key] = read_record(path)
            while len(self._read) > _CACHE_SIZE:
                self._read.popitem(last=False)
        return path, self._read[key]


def _brief(path: Path, document: RecordDocument) -> Answer:
    figures = [asdict(figure) for figure in brief_figures_of(document)]
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
    """Return the 95% Wilson interval of a proportion of ``n`` rows, which is valid for 0 and 1 too.

    Wilson 1927, "Probable inference, the law of succession, and statistical inference".
    """
    z = Z_95 * Z_95 / n
    middle = (share + z / 2) / (1 + z)
    room = math.sqrt(share * (1 - share) * z + z * z / 4) / (1 + z)
    return max(0.0, middle - room), min(1.0, middle + room)


def _is_right(task: TaskResult, sample: SampleResult) -> bool:
    """Return True if the task's main metric is 1 for the sample."""
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
        "thought": sample.thought[:ROOM],
        "target": sample.target[:ROOM],
        "choices": choices[:_CHOICES],
        "is_right": _is_right(task, sample),
        "metrics": dict(sample.metrics),
        "cut": sample.cut,
    }
