"""`gym eval MODEL --data FILE`: evaluate on the user's own rows, compare with the base, and measure retention."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gym_fed.cli.models.needed import ensure_models
from gym_fed.core.console import err, out, print_json, print_table
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.core.progress import spinner
from gym_fed.core.text import counted, plain

if TYPE_CHECKING:
    from gym_fed.data.rows import RowKind
    from gym_fed.evaluation.own_evaluation import OwnResult
    from gym_fed.evaluation.own_set import OwnRow
    from gym_fed.evaluation.scoring.models import ModelRequest, ResolvedModel


_MODEL_CHARACTERS = 30


@dataclass(frozen=True)
class OwnRowsCommand:
    """The options of an evaluation on the user's rows.

    Attributes:
        data: The file of rows.
        columns: ``OURS=THEIRS`` pairs.
        graders: Values of ``--grader``.
        limit: Maximum number of rows to read.
        max_tokens: Maximum number of tokens per answer.
        compare: Model to compare with instead of the base.
        check: True to measure retention.
        yes: Consent to downloads, and to a guess of the columns.
    """

    data: str
    columns: str | None
    graders: tuple[str, ...]
    limit: int | None
    max_tokens: int | None
    compare: str | None
    check: bool
    yes: bool


def evaluate_own_rows(request: ModelRequest, command: OwnRowsCommand, as_json: bool) -> None:
    """Evaluate a model on the user's rows and print the result.

    Raises:
        GymError: ``USAGE`` for several variants or a server; errors from ``read_own_rows`` and ``OwnEvaluation.run``.
    """
    from gym_fed.data.column_question import agreed_columns
    from gym_fed.data.reading import parse_columns
    from gym_fed.evaluation.graders.base import graders_named
    from gym_fed.evaluation.own_evaluation import OwnEvaluation
    from gym_fed.evaluation.own_set import read_own_rows
    from gym_fed.evaluation.scoring.models import resolve_model

    if request.api is not None:
        raise GymError(
            ErrorCode.USAGE,
            "--data FILE cannot be combined with --api",
            "use a model on this machine; to evaluate a server, use --tasks FILE",
        )
    if len(request.variants) > 1 or (request.store is not None and not request.variants):
        raise GymError(
            ErrorCode.USAGE,
            "--data FILE accepts only one variant at a time",
            "choose one with --variant NAME",
        )
    graders = graders_named(command.graders)
    if Path(command.data).expanduser().is_dir():
        raise GymError(
            ErrorCode.USAGE,
            f"--data {command.data} is a folder",
            "pass a file of rows, such as mine.csv; with --suite or --tasks, --data is a folder of evaluation sets",
        )
    kind: RowKind = "any" if graders else "supervised"
    columns = agreed_columns(command.data, columns=parse_columns(command.columns), kind=kind, yes=command.yes)
    rows = read_own_rows(command.data, columns, limit=command.limit, graders=graders)
    model = resolve_model(request)
    ensure_models(model.downloads, command.yes)
    reference, notes = _reference(model, command)
    with spinner("loading the libraries") as activity:
        evaluation = OwnEvaluation(
            model,
            rows,
            reference,
            reference_is_base=command.compare is None,
            graders=graders,
            max_tokens=command.max_tokens,
            check=command.check,
            on_load=lambda name: activity.report(0, 0, f"loading {plain(name, 200)}"),
            on_progress=lambda done, total, what: activity.report(done, total, f"computing {what}"),
        )
        try:
            result = evaluation.run()
        except KeyboardInterrupt:
            raise GymError(
                ErrorCode.INTERRUPTED, "stopped", "--limit N evaluates on the first N rows only"
            ) from None
    result = replace(result, notes=[*notes, *result.notes])
    if as_json:
        print_json(_as_json(model, reference, command, rows, result))
    else:
        _print(model, reference, command, rows, result)
    for warning in result.warnings:
        err.print(f"warning: {warning}", style="yellow", markup=False)


def _reference(model: ResolvedModel, command: OwnRowsCommand) -> tuple[ResolvedModel | None, list[str]]:
    """Return the model to compare with, or the reason for not comparing."""
    from gym_fed.evaluation.scoring.models import origin_of, resolve_model

    if command.compare is not None:
        other = resolve_model(
            replace(
                model.request,
                model=command.compare,
                base=model.request.base if command.compare.endswith(".gymdelta") else None,
                adapters=(),
                variants=(),
                store=None,
            )
        )
        ensure_models(other.downloads, command.yes)
        return other, []
    try:
        base = origin_of(model)
    except GymError as error:
        if error.code is not ErrorCode.MODEL_NOT_FOUND:
            raise
        return None, [f"not compared: {error.message}; {error.hint}"]
    if base is None:
        return None, ["not compared: the base of the model is unknown; pass one with --compare MODEL"]
    return base, []


def _print(
    model: ResolvedModel,
    reference: ResolvedModel | None,
    command: OwnRowsCommand,
    rows: list[OwnRow],
    result: OwnResult,
) -> None:
    from gym_fed.core.console import TextTable
    from gym_fed.evaluation.own_set import MAX_TOKENS, MAX_WORDS
    from gym_fed.evaluation.row_scores import EXACT_MATCH, LOSS

    names = {LOSS: "loss, nats per token", EXACT_MATCH: "exact match, short answers"}
    if reference is None:
        table = TextTable("metric", "n", plain(model.name, _MODEL_CHARACTERS))
    else:
        heads = ("before", "after") if command.compare is None else (command.compare, model.name)
        table = TextTable("metric", "n", *(plain(head, _MODEL_CHARACTERS) for head in heads), "change")
    for metric in result.metrics:
        cells = [names.get(metric.name, metric.name), f"{metric.num_rows:,}"]
        if reference is not None:
            cells.append(_figure(metric.before, metric.before_stderr))
        cells.append(_figure(metric.value, metric.stderr))
        if reference is not None:
            cells.append(_figure(metric.change, metric.change_stderr, sign="+"))
        table.add_row(*cells)
    print_table(table)
    if result.retention is not None:
        out.print(result.retention.describe(), markup=False, highlight=False)
    if reference is not None and command.compare is None:
        err.print(f"before: {plain(reference.name, 200)}", markup=False)
    counts, answered = result.after.counts, [answer for answer in result.after.answers if answer is not None]
    lines = [
        f"{counted(len(rows), 'row')} of {command.data}, rendered as in training; {counts.cut} cut to "
        f"{counted(result.after.max_length, 'token')}, {counts.dropped} with nothing to predict"
    ]
    if answered:
        lines.append(
            f"{counted(len(answered), 'answer')} of at most {counted(result.after.max_tokens, 'token')}; exact "
            f"match counts answers of at most {MAX_WORDS} words and {MAX_TOKENS} tokens"
        )
    if result.after.too_long:
        lines.append(
            f"{counted(result.after.too_long, 'row')} not answered: the prompt fills the model's context"
        )
    for line in (*lines, *result.notes):
        err.print(line, style="dim", markup=False)


def _figure(value: float | None, stderr: float | None, *, sign: str = "") -> str:
    if value is None:
        return "-"
    return f"{value:{sign}.4f}" + ("" if stderr is None else f" ± {stderr:.4f}")


def _as_json(
    model: ResolvedModel,
    reference: ResolvedModel | None,
    command: OwnRowsCommand,
    rows: list[OwnRow],
    result: OwnResult,
) -> dict[str, Any]:
    after, before = result.after, result.before
    return {
        "model": model.name,
        "reference": None if reference is None else reference.name,
        "reference_is_base": reference is not None and command.compare is None,
        "data": command.data,
        "rows": {
            "rows": len(rows),
            "cut": after.counts.cut,
            "dropped": after.counts.dropped,
            "not_answered": after.too_long,
            "unfinished": after.unfinished,
            "max_length": after.max_length,
            "max_tokens": after.max_tokens,
        },
        "metrics": {metric.name: metric.as_dict() for metric in result.metrics},
        "retention": None if result.retention is None else result.retention.as_dict(),
        "samples": [
            {
                "place": row.place,
                "reference": row.reference,
                "after": _sample(after, i),
                "before": None if before is None else _sample(before, i),
            }
            for i, row in enumerate(rows)
        ],
        "warnings": result.warnings,
        "notes": result.notes,
    }


def _sample(scores: Any, i: int) -> dict[str, Any]:
    values = {name: column[i] for name, column in scores.metrics.items()}
    finite = {
        name: value if value is not None and math.isfinite(value) else None for name, value in values.items()
    }
    thought = {"reasoning": scores.thoughts[i]} if scores.thoughts[i] else {}
    return {**finite, "answer": scores.answers[i], **thought, "ended": scores.ended[i]}
