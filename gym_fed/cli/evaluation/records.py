"""`gym eval show`, `compare` and `replay` of records, and the output of `gym eval MODEL`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gym_fed.cli.options import EvaluationSetsOption, RecordArgument
from gym_fed.core.console import AsJson, err, out, print_json, print_result, print_table
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.core.help import FolderOption
from gym_fed.core.text import counted

if TYPE_CHECKING:
    from gym_fed.evaluation.compare import RunComparison
    from gym_fed.evaluation.records.document import RecordDocument
    from gym_fed.evaluation.results import EvalResults, SampleResult


EVALS = Path("evals")


def show_record(
    record: Annotated[
        str | None,
        typer.Argument(
            metavar="[RECORD]",
            help="Id (or its first characters) or file of a record; by default all are listed.",
        ),
    ] = None,
    samples: Annotated[
        int, typer.Option("--samples", min=0, help="Number of samples to show for each task.")
    ] = 0,
    folder: FolderOption = EVALS,
    as_json: AsJson = False,
) -> None:
    """List the records of a folder, or show one: figures with their errors, and samples."""
    if record is None:
        _list(folder, as_json)
        return
    from gym_fed.evaluation.records.reader import named_record, read_record
    from gym_fed.evaluation.results import groups_of, with_groups

    path = named_record(record, folder)
    results = read_record(path)
    if as_json:
        print_json({"id": path.stem, "file": str(path), **_results_as_json(results, samples)})
        return
    out.print(f"{path.stem}  {results.model}")
    _print_figures(with_groups(results, groups_of(results.tasks)))
    for task in results.tasks.values():
        for sample in task.samples[:samples]:
            _print_sample(task.task, sample)


def compare_records(
    first: RecordArgument,
    second: RecordArgument,
    confidence: Annotated[
        float, typer.Option("--confidence", help="Confidence level of the intervals.")
    ] = 0.95,
    shared_rows: Annotated[
        bool, typer.Option("--shared-rows", help="If the rows differ, compare only the shared ones.")
    ] = False,
    folder: FolderOption = EVALS,
    as_json: AsJson = False,
) -> None:
    """Compare two records row by row: the difference, its confidence interval, and p."""
    from gym_fed.evaluation.compare import compare_results
    from gym_fed.evaluation.records.reader import named_record, read_record

    runs = [read_record(named_record(name, folder)) for name in (first, second)]
    compared = compare_results(runs[0], runs[1], confidence=confidence, shared_only=shared_rows)
    print_result(as_json, asdict(compared), lambda: _print_comparison(compared))


def replay_sample(
    record: RecordArgument,
    sample: Annotated[int, typer.Option("--sample", min=0, help="Number of the sample.")],
    task: Annotated[
        str | None,
        typer.Option("--task", metavar="NAME", help="Task of the sample, if the record has several."),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(
            "--model", metavar="MODEL", help="Current location of the model.", show_default="the record's"
        ),
    ] = None,
    data: EvaluationSetsOption = None,
    task_file: Annotated[
        list[str] | None,
        typer.Option(
            "--task-file", metavar="FILE", help="Task file; files named in the record are not read."
        ),
    ] = None,
    folder: FolderOption = EVALS,
    as_json: AsJson = False,
) -> None:
    """Run one sample of a record again and compare the results."""
    from gym_fed.evaluation.records.reader import named_record, read_record
    from gym_fed.evaluation.records.rerun import compare_sample, rerun_on

    results = read_record(named_record(record, folder))
    name, before = _sample_of(results, task, sample)
    again = rerun_on(model or results.model, data, task_file or ())(results, {name: [sample]})
    (now,) = again.tasks[name].samples
    changed = {
        key: (results.identity.get(key, ""), again.identity.get(key, ""))
        for key in ("model", "settings", "delta", "template", "dtype", "engine")
        if results.identity.get(key, "") != again.identity.get(key, "")
    }
    differences = compare_sample(before, now)
    if as_json:
        print_json(
            {
                "task": name,
                "sample": sample,
                "same": differences.difference is None,
                **asdict(differences),
                "identity_differs": changed,
                "before": asdict(before),
                "again": asdict(now),
            }
        )
    else:
        for key, (old, new) in changed.items():
            err.print(f"note: {key} is {new}, but was {old}")
        _print_sample(name, now)
        out.print(_outcome(differences.difference, differences.parted, differences.logprob_error))
    if differences.difference is not None:
        raise typer.Exit(ErrorCode.EXPORT_DIFFERS.exit_code)


def _print_comparison(compared: RunComparison) -> None:
    """Print the comparison of two runs: means, differences with intervals, p-values, and what was not compared."""
    from gym_fed.core.console import TextTable

    level = f"{compared.confidence:.0%}"
    table = TextTable(
        "task", "metric", "n", "first", "second", "first - second", f"{level} interval", "p", "McNemar p"
    )
    for task in compared.tasks.values():
        for metric, comparison in task.metrics.items():
            mcnemar = "" if comparison.mcnemar_p is None else f"{comparison.mcnemar_p:.4f}"
            table.add_row(
                task.task,
                metric if task.higher_is_better[metric] else f"{metric} (lower is better)",
                str(comparison.num_samples),
                f"{task.first[metric]:.4f}",
                f"{task.second[metric]:.4f}",
                f"{comparison.difference:+.4f}",
                f"{comparison.lower:+.4f} to {comparison.upper:+.4f}",
                f"{comparison.p_value:.4f}",
                mcnemar,
            )
    out.print(f"first: {compared.first}; second: {compared.second}")
    print_table(table)
    for task in compared.tasks.values():
        if task.only_first or task.only_second:
            err.print(
                f"{task.task}: left out {counted(task.only_first, 'row')} found only in the first record and "
                f"{task.only_second} found only in the second"
            )
        for note in task.notes:
            err.print(f"{task.task}: {note}")
    if compared.missing:
        err.print(f"tasks in only one of the records: {', '.join(compared.missing)}")


def _list(folder: Path, as_json: bool) -> None:
    from gym_fed.core.console import MAX_CELL, TextTable
    from gym_fed.evaluation.records.reader import brief_figures_of, documents_of, record_paths
    from gym_fed.evaluation.results import listed

    paths = record_paths(folder)
    if not paths and not folder.is_dir():
        raise GymError(
            ErrorCode.FILE_NOT_FOUND, f"no folder at {folder}", "pass the folder of records with --output"
        )
    records: list[dict[str, Any]] = []
    documents: list[RecordDocument] = []
    for path, document in documents_of(paths):
        if isinstance(document, GymError):
            err.print(f"left out: {document}", style="yellow")
            continue
        values = {
            result.evaluation_result_id: result.score_details.score for result in document.evaluation_results
        }
        when, model = document.evaluation_timestamp, document.model_info.name
        records.append({"id": path.stem, "model": model, "at": when, "file": str(path), "figures": values})
        documents.append(document)
    if as_json:
        print_json(records)
        return
    table = TextTable("record", "model", "at", "figures")
    for record, document in zip(records, documents, strict=True):
        texts = [f"{each.task}/{each.metric} {each.value:.4f}" for each in brief_figures_of(document)]
        table.add_row(record["id"], record["model"], record["at"], listed(texts, MAX_CELL))
    print_table(table)


def _print_figures(results: EvalResults) -> None:
    from gym_fed.core.console import TextTable

    table = TextTable("task", "metric", "value", "standard error", "n", "examples in the prompt")
    for task in results.tasks.values():
        for metric, figure in task.figures.items():
            error = "" if figure.stderr is None else f"{figure.stderr:.4f}"
            counts = str(figure.num_samples), str(task.num_fewshot)
            table.add_row(task.task, metric, f"{figure.value:.4f}", error, *counts)
    print_table(table)


def _print_sample(task: str, sample: SampleResult) -> None:
    out.print(f"\n{task}, sample {sample.number}:", style="bold")
    out.print(sample.prompt[-2000:])
    for choice, value in zip(sample.choices, sample.logprobs, strict=False):
        mark = "*" if choice == sample.target or choice.strip() == sample.target.strip() else " "
        out.print(f"  {mark} {value:10.4f}  {choice[:300]}")
    if sample.thought:
        out.print(f"  thought: {sample.thought[:2000]}", style="dim", markup=False)
    if sample.answer is not None:
        out.print(f"  answer: {sample.answer[:2000]}\n  right:  {sample.target[:300]}")
    out.print("  " + ", ".join(f"{name} {value:g}" for name, value in sample.metrics.items()))


def _outcome(difference: str | None, parted: int | None, error: float) -> str:
    if difference is not None:
        return f"differs: {difference}"
    if parted is not None:
        return f"the same up to token {parted}, where two tokens were equally likely"
    return f"the same; log-likelihoods within {error:.2g} nats"


def _sample_of(results: EvalResults, task: str | None, number: int) -> tuple[str, SampleResult]:
    if task is None and len(results.tasks) > 1:
        raise GymError(
            ErrorCode.USAGE,
            f"the record has {counted(len(results.tasks), 'task')}",
            f"choose one, such as --task {next(iter(results.tasks))}",
        )
    name = task or next(iter(results.tasks))
    if name not in results.tasks:
        raise GymError(
            ErrorCode.USAGE, f"the record has no task {name}", f"one of {', '.join(results.tasks)}"
        )
    samples = results.tasks[name].samples
    if (sample := next((each for each in samples if each.number == number), None)) is not None:
        return name, sample
    raise GymError(
        ErrorCode.USAGE, f"{name} has no sample {number}", f"it has {counted(len(samples), 'sample')}"
    )


def _results_as_json(results: EvalResults, samples: int) -> Mapping[str, Any]:
    """Return the figures, the facts that they depend on, and the first samples of each task."""
    tasks = {
        name: {
            "version": task.version,
            "num_fewshot": task.num_fewshot,
            "lock": task.lock,
            "figures": {metric: asdict(figure) for metric, figure in task.figures.items()},
            "unfinished": task.num_unfinished,
            "samples": [asdict(sample) for sample in task.samples[:samples]],
        }
        for name, task in results.tasks.items()
    }
    return {
        "model": results.model,
        "identity": dict(results.identity),
        "seconds": results.seconds,
        "facts": dict(results.facts),
        "tasks": tasks,
    }


@dataclass(frozen=True)
class EvaluationRun:
    """The results of one model, and their record.

    Attributes:
        results: The computed or cached results.
        record: The record's path.
        is_cached: True if the results were read from the record.
        group_of: The group of each task.
    """

    results: EvalResults
    record: Path
    is_cached: bool
    group_of: Mapping[str, str]

    @property
    def with_groups(self) -> EvalResults:
        """The results with an entry for each group of several tasks."""
        from gym_fed.evaluation import results

        return results.with_groups(self.results, self.group_of)


def print_runs(runs: Sequence[EvaluationRun], others: Sequence[EvaluationRun], as_json: bool) -> None:
    """Print the results of models, and the comparison of each with the first of ``others``."""
    from gym_fed.evaluation.compare import compare_results

    comparisons = [compare_results(run.with_groups, others[0].with_groups) for run in runs if others]
    if as_json:
        runs_as_json = [_as_json(run) for run in (*runs, *others)]
        print_json({"runs": runs_as_json, "comparisons": [asdict(compared) for compared in comparisons]})
        return
    _print_table([*runs, *others])
    for compared in comparisons:
        _print_comparison(compared)
    _print_notes([*runs, *others])


def _as_json(run: EvaluationRun) -> dict[str, Any]:
    tasks = _results_as_json(run.with_groups, 0)["tasks"]
    return {
        "groups": {name: tasks[name] for name in tasks if name not in run.results.tasks},
        "id": run.record.stem,
        "file": str(run.record),
        "cached": run.is_cached,
        **_results_as_json(run.results, 0),
    }


def _print_table(runs: Sequence[EvaluationRun]) -> None:
    """Print a row for each figure of each model."""
    from gym_fed.core.console import TextTable

    several = len(runs) > 1
    table = TextTable("task", "metric", *(["model"] if several else []), "value", "n")
    all_results = [run.with_groups for run in runs]
    figures = dict.fromkeys(
        (task, metric)
        for results in all_results
        for task, result in results.tasks.items()
        for metric in result.figures
    )
    for task, metric in figures:
        for results in all_results:
            result = results.tasks.get(task)
            if result is not None and metric in result.figures:
                figure = result.figures[metric]
                model = [results.model] if several else []
                error = "" if figure.stderr is None else f" ± {figure.stderr:.3f}"
                table.add_row(task, metric, *model, f"{figure.value:.3f}{error}", str(figure.num_samples))
    print_table(table)


def _print_notes(runs: Sequence[EvaluationRun]) -> None:
    err.print(f"chat template: {_template(runs[0])}")
    for run in runs:
        if run.is_cached:
            err.print(f"cached: {run.results.model} was not run again: {run.record}")
            continue
        models = run.results.facts.get("models_in_pass", 1)
        passed = f" for {counted(models, 'model')} in one pass" if models != 1 else ""
        err.print(f"record: {run.record}, {run.results.seconds:.1f} s{passed}")
        if cut := sum(task.num_unfinished for task in run.results.tasks.values()):
            err.print(
                f"{counted(cut, 'answer')} with truncated reasoning scored as empty: raise max_gen_toks"
            )


def _template(run: EvaluationRun) -> str:
    """Describe how the prompts were made."""
    tasks = run.results.tasks
    plain = [name for name, task in tasks.items() if not task.chat_template]
    if len(plain) == len(tasks):
        return "not applied; prompts are plain text"
    if not plain:
        return "applied"
    applied, others = (
        ", ".join(dict.fromkeys(run.group_of.get(name, name) for name in names))
        for names in ([name for name in tasks if name not in plain], plain)
    )
    return f"applied to {applied}; not to {others}"
