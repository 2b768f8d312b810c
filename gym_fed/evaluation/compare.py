"""Row-by-row comparison of two runs: differences with confidence intervals and p-values, and McNemar's test.

Rows are paired by their digest. The scores of two models on the same rows are correlated, so the paired difference has
a smaller standard error than the two means. Even so, 200 rows are too few to detect a difference of 2 points.

Sources: Efron and Tibshirani 1993, "An Introduction to the Bootstrap", chapters 13 (percentile interval) and 16
(resampling under the hypothesis of no difference); McNemar 1947, in its exact form; Koehn 2004 for paired resampling.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.core.text import counted
from gym_fed.evaluation.results import EvalResults, SampleResult, TaskResult, standard_error

RESAMPLES = 10_000
_BLOCK = 1 << 22  # draws per batch: 32 MiB


@dataclass(frozen=True)
class PairedDifference:
    """The mean paired difference of two runs over the same rows.

    Attributes:
        difference: First minus second.
        stderr: Standard error of ``difference``; None for fewer than two rows.
        lower: Lower bound of the confidence interval.
        upper: Upper bound of the confidence interval.
        p_value: Two-sided p-value of the difference.
        mcnemar_p: Two-sided p-value of McNemar's exact test; None unless all values are 0 or 1.
        first_only: The number of rows that only the first run has right; None as for ``mcnemar_p``.
        second_only: The number of rows that only the second run has right; None as for ``mcnemar_p``.
    """

    difference: float
    stderr: float | None
    lower: float
    upper: float
    p_value: float
    num_samples: int
    mcnemar_p: float | None = None
    first_only: int | None = None
    second_only: int | None = None


@dataclass(frozen=True)
class TaskComparison:
    """The comparison of one task in two runs.

    Attributes:
        task: Name.
        metrics: Differences by metric, over common rows.
        first: Means of the first run over these rows.
        second: Means of the second run over these rows.
        higher_is_better: True if a higher value is better, by metric.
        only_first: The number of rows missing from the second run.
        only_second: The number of rows missing from the first run.
        notes: Other differences, such as the number of examples in the prompt.
    """

    task: str
    metrics: Mapping[str, PairedDifference]
    first: Mapping[str, float]
    second: Mapping[str, float]
    higher_is_better: Mapping[str, bool]
    only_first: int
    only_second: int
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class RunComparison:
    """The comparison of two runs, task by task.

    Attributes:
        first: Name of the first model.
        second: Name of the second.
        tasks: Comparisons by task, for common tasks.
        missing: Tasks that only one of the runs has.
    """

    first: str
    second: str
    confidence: float
    tasks: Mapping[str, TaskComparison]
    missing: tuple[str, ...] = field(default=())


def compare_results(
    first: EvalResults,
    second: EvalResults,
    *,
    confidence: float = 0.95,
    shared_only: bool = False,
) -> RunComparison:
    """Compare two runs on their common tasks.

    Args:
        second: The second run; a positive difference means that ``first`` is higher.
        confidence: Confidence of the intervals, between 0 and 1.
        shared_only: If the rows differ, compare on those in both; False raises an error.

    Raises:
        GymError: ``USAGE`` if no task is in both, or rows differ.
    """
    names = [name for name in first.tasks if name in second.tasks]
    if not names:
        raise GymError(
            ErrorCode.USAGE,
            f"the results have no task in common: {', '.join(first.tasks)} and {', '.join(second.tasks)}",
            "evaluate both models on the same tasks",
        )
    tasks = {
        name: _compared(first.tasks[name], second.tasks[name], confidence, shared_only) for name in names
    }
    missing = tuple(sorted(first.tasks.keys() ^ second.tasks.keys()))
    return RunComparison(first.model, second.model, confidence, tasks, missing)


def paired_difference(
    first: Sequence[float],
    second: Sequence[float],
    *,
    confidence: float = 0.95,
    resamples: int = RESAMPLES,
    seed: int = 0,
) -> PairedDifference:
    """Compute the mean difference of two runs' values over the same rows, in the same order.

    The interval is the percentile interval of the bootstrap over rows. For ``p_value``, the differences are shifted to
    a mean of 0 and resampled; it is the share of means at least as far from 0 as the observed one, which is included.

    Args:
        first: One value a row.
        second: The second run's values, as many as ``first``.
        confidence: Confidence of the interval, between 0 and 1.
        resamples: Number of bootstrap resamples, at least 100.

    Raises:
        GymError: ``USAGE`` for no rows, unequal lengths, or settings out of range.
    """
    if len(first) != len(second) or not first:
        raise GymError(ErrorCode.USAGE, f"{len(first)} and {len(second)} values cannot be paired")
    if not 0 < confidence < 1 or resamples < 100:
        raise GymError(
            ErrorCode.USAGE,
            f"confidence {confidence:g} or resamples {resamples} is out of range",
            "set confidence between 0 and 1, and at least 100 resamples",
        )
    first_values, second_values = np.asarray(first, dtype=np.float64), np.asarray(second, dtype=np.float64)
    differences = first_values - second_values
    count, mean = len(differences), float(differences.mean())
    means = _bootstrap_means(differences, resamples, seed)
    tail = (1 - confidence) / 2
    lower, upper = np.quantile(means, [tail, 1 - tail])
    # Tolerance for equal sums that were rounded differently.
    extreme = int(np.count_nonzero(np.abs(means - mean) >= abs(mean) - 1e-12))
    first_only = second_only = mcnemar_p = None
    if np.isin(first_values, (0.0, 1.0)).all() and np.isin(second_values, (0.0, 1.0)).all():
        first_only, second_only = int((differences > 0).sum()), int((differences < 0).sum())
        mcnemar_p = exact_mcnemar(first_only, second_only)
    return PairedDifference(
        difference=mean,
        stderr=standard_error(differences),
        lower=float(lower),
        upper=float(upper),
        p_value=(extreme + 1) / (resamples + 1),
        num_samples=count,
        mcnemar_p=mcnemar_p,
        first_only=first_only,
        second_only=second_only,
    )


def exact_mcnemar(only_first: int, only_second: int) -> float:
    """Return the two-sided p-value of McNemar's exact test: under the null hypothesis, a row that only one run has
    right is equally likely to be right in either run.

    Args:
        only_first: The number of rows that only the first run has right.
        only_second: The number of rows that only the second run has right.
    """
    total = only_first + only_second
    term = ways = 1  # C(total, 0), and the sum up to the smaller count
    for successes in range(min(only_first, only_second)):
        term = term * (total - successes) // (successes + 1)
        ways += term
    return min(1.0, 2 * ways / (1 << total)) if total else 1.0


def _bootstrap_means(values: np.ndarray, resamples: int, seed: int) -> np.ndarray:
    """Return bootstrap means, float64 ``[resamples]``."""
    generator, count = np.random.default_rng(seed), len(values)
    at_once = max(1, _BLOCK // count)
    means = [
        values[generator.integers(count, size=(min(at_once, resamples - start), count))].mean(axis=1)
        for start in range(0, resamples, at_once)
    ]
    return np.concatenate(means)


def _compared(first: TaskResult, second: TaskResult, confidence: float, shared_only: bool) -> TaskComparison:
    ours, theirs = _by_row(first), _by_row(second)
    shared = [key for key in ours if key in theirs]
    only_first, only_second = len(ours) - len(shared), len(theirs) - len(shared)
    if not shared or ((only_first or only_second) and not shared_only):
        raise GymError(
            ErrorCode.USAGE,
            f"{first.task}: the runs share {counted(len(shared), 'row')}; {only_first} are only in the first, "
            f"{only_second} only in the second",
            "pass --shared-rows to compare on those" if shared else "evaluate both on the same rows",
        )
    pairs = [(ours[key].metrics, theirs[key].metrics) for key in shared]
    differences, first_means, second_means = {}, {}, {}
    for metric in first.figures:
        if metric not in second.figures or not all(metric in a and metric in b for a, b in pairs):
            continue  # a metric of the full set, without values per row
        first_values, second_values = [a[metric] for a, _ in pairs], [b[metric] for _, b in pairs]
        differences[metric] = paired_difference(first_values, second_values, confidence=confidence)
        first_means[metric] = float(np.mean(first_values))
        second_means[metric] = float(np.mean(second_values))
    return TaskComparison(
        task=first.task,
        metrics=differences,
        first=first_means,
        second=second_means,
        higher_is_better={metric: first.figures[metric].higher_is_better for metric in differences},
        only_first=only_first,
        only_second=only_second,
        notes=_notes(first, second, differences),
    )


def _by_row(task: TaskResult) -> dict[tuple[str, int], SampleResult]:
    """Return samples by row digest and repetition number, so that duplicate rows have different keys."""
    seen: Counter[str] = Counter()
    by_row = {}
    for sample in task.samples:
        by_row[sample.row_sha256, seen[sample.row_sha256]] = sample
        seen[sample.row_sha256] += 1
    return by_row


def _notes(first: TaskResult, second: TaskResult, compared: Container[str]) -> tuple[str, ...]:
    notes = []
    if first.chat_template != second.chat_template:
        notes.append("a chat template was applied in only one of the runs")
    if first.num_fewshot != second.num_fewshot:
        notes.append(
            f"prompts have {counted(first.num_fewshot, 'example')} in the first run, {second.num_fewshot} in the second"
        )
    if (first.version, first.lock) != (second.version, second.lock):
        notes.append("the task's definition or data differ")
    left = [m for m in first.figures if m not in compared]
    if left:
        notes.append(f"no per-row values, so not compared: {', '.join(left)}")
    return tuple(notes)
