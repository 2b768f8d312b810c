"""`gym eval MODEL`: a model, or many variants of one base in one pass, on suites of tasks."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from gym_fed.cli.completion import models, suites
from gym_fed.cli.evaluation.own_rows import OwnRowsCommand, evaluate_own_rows
from gym_fed.cli.evaluation.records import EVALS, EvaluationRun, print_runs
from gym_fed.cli.models.needed import YesOption, ensure_models
from gym_fed.cli.next_command import after_eval, print_next
from gym_fed.cli.options import ApiKeyEnvOption, VariantsOption, refuse_options, require_api_key
from gym_fed.core.console import AsJson, err
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.core.help import DEVICE, AdapterOption, AllVariants, ColumnsOption, FolderOption
from gym_fed.core.progress import spinner
from gym_fed.core.text import counted, plain

if TYPE_CHECKING:
    from gym_fed.evaluation.evaluator import Evaluator, Progress
    from gym_fed.evaluation.scoring.models import ModelRequest


_SHORTEST_ID = 6


def run_evaluation(
    model: Annotated[
        str | None,
        typer.Argument(
            help="Model folder or name, run, adapter, BASE:VARIANT or .gymdelta; with --api a model's name.",
            autocompletion=models,
        ),
    ] = None,
    suite: Annotated[
        list[str] | None,
        typer.Option(
            "--suite",
            metavar="NAME",
            help="Suite, as `gym eval list` shows; repeatable.",
            autocompletion=suites,
        ),
    ] = None,
    data: Annotated[
        str | None,
        typer.Option("--data", metavar="FILE", help="File of your own rows, or folder of evaluation sets."),
    ] = None,
    columns: ColumnsOption = None,
    limit: Annotated[
        int | None, typer.Option("--limit", min=1, help="Maximum number of rows of each task.")
    ] = None,
    max_tokens: Annotated[
        int | None,
        typer.Option(
            "--max-tokens", min=1, help="Maximum number of tokens per answer.", show_default="twice the rows'"
        ),
    ] = None,
    grader: Annotated[
        list[str] | None,
        typer.Option("--grader", metavar="NAME", help="Grader of the answers, such as numeric."),
    ] = None,
    compare: Annotated[
        str | None, typer.Option("--compare", metavar="OTHER", help="Compare with this model or record.")
    ] = None,
    adapter: AdapterOption = None,
    variant: VariantsOption = None,
    variants: AllVariants = None,
    base: Annotated[
        str | None,
        typer.Option(
            "--base",
            metavar="MODEL",
            help="Base of a .gymdelta.",
            autocompletion=models,
            show_default="named there",
        ),
    ] = None,
    tasks: Annotated[
        list[str] | None,
        typer.Option("--tasks", metavar="A,B", help="Tasks, groups or task files, separated by commas."),
    ] = None,
    num_fewshot: Annotated[
        int | None,
        typer.Option(
            "--num-fewshot", min=0, help="Number of examples per prompt.", show_default="the task's"
        ),
    ] = None,
    apply_chat_template: Annotated[
        bool | None,
        typer.Option(
            "--apply-chat-template/--no-chat-template",
            help="Use the chat template.",
            show_default="the task's",
        ),
    ] = None,
    check: Annotated[bool, typer.Option("--check/--no-check", help="Measure lost knowledge.")] = True,
    dtype: Annotated[
        str, typer.Option("--dtype", metavar="DTYPE", help="Data type: float32 or bfloat16.")
    ] = "float32",
    device: Annotated[str, DEVICE] = "cpu",
    api: Annotated[
        str | None,
        typer.Option("--api", metavar="URL", help="Evaluate the model of this OpenAI-compatible server."),
    ] = None,
    api_key_env: ApiKeyEnvOption = None,
    folder: FolderOption = EVALS,
    fresh: Annotated[
        bool, typer.Option("--fresh", help="Evaluate again, even if there is a record.")
    ] = False,
    yes: YesOption = False,
    as_json: AsJson = False,
) -> None:
    """Evaluate a model on suites of tasks, or on your own rows (--data FILE): figures with standard errors.

    A run, adapter or variant is compared with its base. Run again to resume.
    """
    from gym_fed.evaluation.evaluator import Evaluator
    from gym_fed.evaluation.records.reader import read_record
    from gym_fed.evaluation.scoring.models import BASE, ModelRequest, named_variants

    if model is None and api is None:
        raise GymError(
            ErrorCode.USAGE,
            "MODEL is missing",
            "pass gym-nano, a folder (one called run is ./run), or --api URL",
        )
    benchmarks = [*named_variants(suite or ()), *named_variants(tasks or ())]
    if benchmarks:
        refuse_options(
            {"--columns": columns, "--grader": grader, "--max-tokens": max_tokens, "--no-check": not check},
            "needs --data FILE, without --suite and --tasks",
            "leave one of them out",
        )
    elif data is None:
        raise GymError(
            ErrorCode.USAGE,
            "no rows or suites to evaluate on",
            "pass your own rows (--data FILE), or a suite such as --suite tiny; gym eval list shows the suites",
        )
    if api_key_env is not None and api is None:
        raise GymError(ErrorCode.USAGE, "--api-key-env needs --api", "leave it out")
    request = ModelRequest(
        model or "",
        base=base,
        adapters=tuple(adapter or ()),
        variants=named_variants(variant or ()),
        store=variants,
        api=api,
        api_key=None if api_key_env is None else require_api_key(api_key_env),
        device=device,
        dtype=dtype,
    )

    if not benchmarks:
        chat_template = apply_chat_template is not None
        refuse_options(
            {"--num-fewshot": num_fewshot, "--apply-chat-template": chat_template, "--fresh": fresh},
            "needs --suite or --tasks",
        )
        evaluate_own_rows(
            request,
            OwnRowsCommand(
                str(data),
                columns=columns,
                graders=tuple(grader or ()),
                limit=limit,
                max_tokens=max_tokens,
                compare=compare,
                check=check,
                yes=yes,
            ),
            as_json,
        )
        return

    def evaluator(of: ModelRequest) -> Evaluator:
        return Evaluator(
            benchmarks,
            of,
            num_examples=limit,
            num_fewshot=num_fewshot,
            apply_chat_template=apply_chat_template,
            data=None if data is None else Path(data),
            out=folder,
            fresh=fresh,
        )

    first = evaluator(request)
    record = None if compare is None else _record(compare, folder)
    second = None if compare is None or record is not None else evaluator(_other(compare, request))
    if second is not None:
        _require_other(second, folder, yes)
    runs = _run(first, yes)
    others: list[EvaluationRun] = []
    if record is not None:
        others = [EvaluationRun(read_record(record), record, True, first.group_of)]
    elif second is not None:
        others = _run(second, yes)
    print_runs(runs, others, as_json)
    tasks_found = runs[0].results.tasks.values()
    if num_fewshot and (fixed := [task.task for task in tasks_found if task.num_fewshot != num_fewshot]):
        err.print(
            f"--num-fewshot {num_fewshot}: not supported by {', '.join(fixed)}, which are defined without examples"
        )
    if api is None and not as_json and request.model:
        only = request.variants[0] if len(request.variants) == 1 and request.variants[0] != BASE else None
        print_next(after_eval(str(request.model), only, variants if only else None))


def _run(evaluator: Evaluator, yes: bool) -> list[EvaluationRun]:
    """Run an evaluator and show its progress on standard error.

    Raises:
        GymError: ``INTERRUPTED`` on Ctrl-C; as in ``Evaluator``.
    """
    ensure_models(evaluator.model.downloads, yes)
    reached: Progress | None = None
    name = evaluator.model.name or str(evaluator.model.request.api)
    with spinner(f"loading {plain(name, 200)}") as activity:

        def on_progress(progress: Progress) -> None:
            nonlocal reached
            if reached is None and progress.done:
                requests = counted(progress.total, "request")
                err.print(f"reusing {progress.done:,} of {requests}, computed by an earlier run")
            reached = progress
            activity.report(progress.done, progress.total, f"evaluating {progress.task}".rstrip())

        evaluator.on_progress = on_progress
        try:
            runs = evaluator.run_all()
        except KeyboardInterrupt:
            done = "" if reached is None else f" after {reached.done} of {counted(reached.total, 'request')}"
            raise GymError(
                ErrorCode.INTERRUPTED, f"stopped{done}", "run the same command to resume"
            ) from None
    return [
        EvaluationRun(results, evaluator.records[name], name in evaluator.cached, evaluator.group_of)
        for name, results in runs.items()
    ]


def _record(reference: str, folder: Path) -> Path | None:
    """Return the record that ``--compare`` names; None if it names a model."""
    from gym_fed.evaluation.records.document import paths_of
    from gym_fed.evaluation.records.reader import named_record

    is_id = len(reference) >= _SHORTEST_ID and not Path(reference).exists() and paths_of(reference, folder)
    return named_record(reference, folder) if is_id or reference.endswith(".json") else None


def _require_other(evaluator: Evaluator, folder: Path, yes: bool) -> None:
    """Refuse or fetch the model of ``--compare`` before the first one is evaluated, which may take hours."""
    try:
        ensure_models(evaluator.model.downloads, yes)
    except GymError as error:
        message = f"--compare: no record in {folder} has this id, and as a model: {error.message}"
        raise GymError(error.code, message, error.hint) from error


def _other(reference: str, request: ModelRequest) -> ModelRequest:
    """Return a request for another model with the options of the first."""
    base = request.base if reference.endswith(".gymdelta") else None
    return replace(request, model=reference, base=base, adapters=(), variants=(), store=None)
