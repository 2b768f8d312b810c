"""The output of `gym eval MODEL`: a table of all models, notes on reused records, and comparisons."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gym_fed.cli.evaluation.records import print_comparison, results_as_json
from gym_fed.core.console import err, print_json, print_table

if TYPE_CHECKING:
    from gym_fed.evaluation.results import EvalResults, Figure


@dataclass(frozen=True)
class EvaluationRun:
    """One model's results.

    Attributes:
        results: As they were computed or read.
        record: Where they lie.
        is_cached: Whether they were read.
        group_of: The group of each task.
    """

    results: EvalResults
    record: Path
    is_cached: bool
    group_of: Mapping[str, str]

    @property
    def shown(self) -> EvalResults:
        """The results with an entry for each group of several tasks."""
        from gym_fed.evaluation.results import with_groups

        return with_groups(self.results, self.group_of)


def print_runs(runs: Sequence[EvaluationRun], others: Sequence[EvaluationRun], as_json: bool) -> None:
    """Print models, and each against the first of ``others``."""
    from gym_fed.evaluation.compare import compare_results

    comparisons = [compare_results(run.shown, others[0].shown) for run in runs if others]
    if as_json:
        shown = {"runs": [_as_json(run) for run in (*runs, *others)]}
        print_json({**shown, "comparisons": [asdict(comparison) for comparison in comparisons]})
        return
    _print_table([*runs, *others])
    for compared in comparisons:
        print_comparison(compared)
    _print_notes([*runs, *others])


def _as_json(run: EvaluationRun) -> dict[str, Any]:
    shown = results_as_json(run.shown, 0)["tasks"]
    return {
        "groups": {name: shown[name] for name in shown if name not in run.results.tasks},
        "id": run.record.stem,
        "file": str(run.record),
        "cached": run.is_cached,
        **results_as_json(run.results, 0),
    }


def _print_table(runs: Sequence[EvaluationRun]) -> None:
    """A line for each figure of each model."""
    from gym_fed.core.console import TextTable

    several = len(runs) > 1
    table = TextTable("task", "metric", *(["model"] if several else []), "value", "n")
    shown = [run.shown for run in runs]
    figures = dict.fromkeys(
        (task, metric) for one in shown for task, result in one.tasks.items() for metric in result.figures
    )
    for task, metric in figures:
        for one in shown:
            result = one.tasks.get(task)
            if result is not None and metric in result.figures:
                figure = result.figures[metric]
                model = [one.model] if several else []
                table.add_row(task, metric, *model, shown_figure(figure), str(figure.num_samples))
    print_table(table)


def shown_figure(figure: Figure) -> str:
    """``0.267 ± 0.058``, the standard error behind the value."""
    return f"{figure.value:.3f}" + ("" if figure.stderr is None else f" ± {figure.stderr:.3f}")


def _print_notes(runs: Sequence[EvaluationRun]) -> None:
    err.print(f"chat template: {_template(runs[0])}")
    for run in runs:
        if run.is_cached:
            err.print(f"cached: {run.results.model} was not run again: {run.record}")
            continue
        models = run.results.facts.get("models_in_pass", 1)
        passed = f" for {models} models in one pass" if models != 1 else ""
        err.print(f"record: {run.record}, {run.results.seconds:.1f} s{passed}")


def _template(run: EvaluationRun) -> str:
    """Describe how the prompts were made."""
    tasks = run.results.tasks
    plain = [name for name, task in tasks.items() if not task.chat_template]
    if len(plain) == len(tasks):
        return "not applied, prompts are plain"
    applied = dict.fromkeys(run.group_of.get(name, name) for name in tasks if name not in plain)
    if not plain:
        return "applied"
    named = dict.fromkeys(run.group_of.get(name, name) for name in plain)
    return f"applied to {', '.join(applied)}; not to {', '.join(named)}"
