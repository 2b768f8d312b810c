"""What `gym eval MODEL` prints: figures of all models in one table, what was read and not computed, comparisons."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gym_fed.cli.evaluation.records import print_comparison, results_as_json
from gym_fed.console import err, print_json, print_table

if TYPE_CHECKING:
    from gym_fed.evaluation.results import EvalResults, Figure


@dataclass(frozen=True)
class EvaluationRun:
    """One model's results.

    Attributes:
        results: As they were computed or read.
        record: Where they lie.
        is_cached: Whether they were read.
    """

    results: EvalResults
    record: Path
    is_cached: bool


def print_runs(runs: Sequence[EvaluationRun], others: Sequence[EvaluationRun], as_json: bool) -> None:
    """Print models, and each against the first of ``others``."""
    from gym_fed.evaluation.compare import compare_results

    comparisons = [compare_results(run.results, others[0].results) for run in runs if others]
    if as_json:
        shown = {"runs": [_as_json(run) for run in (*runs, *others)]}
        print_json({**shown, "comparisons": [asdict(one) for one in comparisons]})
        return
    _print_table([*runs, *others])
    for compared in comparisons:
        print_comparison(compared)
    _print_notes([*runs, *others])


def _as_json(run: EvaluationRun) -> dict[str, Any]:
    return {
        "id": run.record.stem,
        "file": str(run.record),
        "cached": run.is_cached,
        **results_as_json(run.results, 0),
    }


def _print_table(runs: Sequence[EvaluationRun]) -> None:
    """A line for each figure of each model."""
    from gym_fed.tables import TextTable

    several = len(runs) > 1
    table = TextTable("task", "metric", *(["model"] if several else []), "value", "n")
    figures = dict.fromkeys(
        (task, metric)
        for run in runs
        for task, found in run.results.tasks.items()
        for metric in found.figures
    )
    for task, metric in figures:
        for run in runs:
            found = run.results.tasks.get(task)
            if found is not None and metric in found.figures:
                figure = found.figures[metric]
                model = [run.results.model] if several else []
                table.add_row(task, metric, *model, shown_figure(figure), str(figure.num_samples))
    print_table(table)


def shown_figure(figure: Figure) -> str:
    """``0.267 ± 0.058``, the standard error behind the value."""
    return f"{figure.value:.3f}" + ("" if figure.stderr is None else f" ± {figure.stderr:.3f}")


def _print_notes(runs: Sequence[EvaluationRun]) -> None:
    first = runs[0].results
    in_template = [name for name, task in first.tasks.items() if task.chat_template]
    if len(in_template) == len(first.tasks):
        err.print("chat template: applied")
    elif in_template:
        plain = len(first.tasks) - len(in_template)
        err.print(f"chat template: applied to {_named(in_template)}; the prompts of {plain} tasks are plain")
    else:
        err.print("chat template: not applied, prompts are plain")
    computed = [run for run in runs if not run.is_cached]
    for run in runs:
        if run.is_cached:
            err.print(f"cached: {run.results.model} was not run again: {run.record}")
    for run in computed:
        err.print(f"record: {run.record}")
    if computed:
        err.print(f"{max(run.results.seconds for run in computed):.1f} s")


def _named(names: Sequence[str]) -> str:
    shown = ", ".join(names[:3])
    return shown if len(names) <= 3 else f"{shown} and {len(names) - 3} more"
