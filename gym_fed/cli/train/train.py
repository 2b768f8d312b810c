"""`gym train`: train a model from one config file; Ctrl-C saves a checkpoint, and the same command resumes."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from gym_fed.cli.models.needed import YesOption, require_rows, with_models
from gym_fed.cli.next_command import print_next
from gym_fed.cli.train.progress import progress, readable_warnings, report_rows, stop_on_ctrl_c
from gym_fed.core.console import AsJson, MemberName, err, out, print_columns, print_json, print_result
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.core.help import IgnoreUnsupported, SetOption
from gym_fed.core.progress import spinner
from gym_fed.core.registries import ALGORITHMS, SCHEDULERS
from gym_fed.core.text import counted, plain

if TYPE_CHECKING:
    from gym_fed.config.parsed import ParsedConfig
    from gym_fed.config.train.training import TrainingConfig
    from gym_fed.training.processes.ranks import Machines
    from gym_fed.training.run.result import CheckResult, TrainResult


def train(
    config: Annotated[Path | None, typer.Argument(help="YAML file, such as configs/nano-sft.yaml.")] = None,
    set_: SetOption = None,
    plan: Annotated[
        bool, typer.Option("--plan", help="Print the memory and time that the run would need, and exit.")
    ] = False,
    check: Annotated[
        bool,
        typer.Option(
            "--check/--no-check",
            help="Measure held-out loss, answers to three of your prompts, and general knowledge.",
        ),
    ] = True,
    nproc: Annotated[
        int | None, typer.Option("--nproc", min=1, help="Number of processes to train in on this machine.")
    ] = None,
    nnodes: Annotated[
        int, typer.Option("--nnodes", min=1, help="Number of machines that run this command.")
    ] = 1,
    rdzv_endpoint: Annotated[
        str | None,
        typer.Option(
            "--rdzv-endpoint",
            metavar="HOST:PORT",
            help="Rendezvous address, the same on all machines.",
        ),
    ] = None,
    launch: Annotated[
        str | None,
        typer.Option(
            "--launch",
            click_type=MemberName(SCHEDULERS),
            help="Print a job script for this cluster scheduler, and exit.",
        ),
    ] = None,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Delete the run in output_dir first, finished or not.")
    ] = False,
    resume: Annotated[
        bool, typer.Option("--resume/--no-resume", help="Resume an unfinished run, or refuse to.")
    ] = True,
    ignore_unsupported: IgnoreUnsupported = False,
    yes: YesOption = False,
    as_json: AsJson = False,
) -> None:
    """Train a model by a config file, ours or LLaMA-Factory's, or by flags. The same command resumes a stopped run.

    Every key of a config is a flag: gym train --model MODEL --data rows.jsonl --finetuning lora --max-steps 100.
    Columns of other names: --columns prompt=question,completion=answer. The keys: docs/train.md, gym configs schema.
    """
    if config is None and not set_:
        raise GymError(ErrorCode.USAGE, "CONFIG is missing", f"pass a YAML file, or flags: {_FLAGS}")
    # Importing the config schemas takes a third of a second, which --help avoids.
    from gym_fed.config.parsed import ParsedConfig
    from gym_fed.config.training_file import load_training_config

    parsed = None
    if config is not None:
        _require_config(config)
        parsed = ParsedConfig.read(config)
        if parsed.dialect is not None and parsed.dialect.job_of(parsed.values) == "predict":
            from gym_fed.cli.train.predict import predict_by

            predict_by(parsed, set_ or [], yes=yes, as_json=as_json)
            return
    given = _first_keys(parsed, set_ or [])
    if not overwrite:
        _require_plugins(given)
    from gym_fed.data.column_question import with_agreed_columns
    from gym_fed.training.processes.ranks import Machines, is_main, world_size

    if launch:
        not_in_jobs = {"--plan": plan, "--overwrite": overwrite, "--rdzv-endpoint": rdzv_endpoint}
        for option, value in {**not_in_jobs, "--json": as_json}.items():
            if value:
                message = f"--launch {launch} cannot be combined with {option}"
                raise GymError(ErrorCode.USAGE, message, "leave one of them out")
    machines = Machines() if launch else Machines.parse(nnodes, rdzv_endpoint)
    processes = world_size() if nproc is None and nnodes == 1 else nnodes * (nproc or 1)
    out.quiet = err.quiet = not is_main()  # under torchrun, only one of the processes prints

    def load() -> tuple[TrainingConfig, list[str]]:
        settings, notes = load_training_config(
            parsed, set_ or [], ignore_unsupported=ignore_unsupported, processes=processes
        )
        kind = ALGORITHMS.type_of(settings.algorithm).row_kind
        return with_agreed_columns(settings, kind, yes), notes

    if plan or launch:
        settings, notes = load()  # neither fetches anything
    else:
        settings, notes = with_models(load, _named_model(given), lambda loaded: loaded[0], yes)
    for note in notes:
        err.print(f"note: {note}")
    if plan:
        _print_plan(settings, nnodes * (nproc or 1), check, as_json)
        return
    from gym_fed.training.run.folder import RunFolder

    if launch:
        RunFolder(settings.output_dir).require_unfinished()
        flags = {"--no-check": not check, "--no-resume": not resume, "--yes": yes}
        flags["--ignore-unsupported"] = ignore_unsupported
        words = [*(set_ or ()), *(flag for flag, is_given in flags.items() if is_given)]
        _print_launch(launch, settings, config, words, (nnodes, nproc or 1))
        return

    if is_main():
        if overwrite:
            RunFolder(settings.output_dir).delete()
        RunFolder(settings.output_dir).require_unfinished()
    if settings.preprocess_only or settings.evaluate_only:
        (_preprocess if settings.preprocess_only else _evaluate)(settings, as_json)
        return
    require_rows(settings)
    if processes > world_size():
        _in_processes(settings, nproc or 1, machines, overwrite)
    err.print(f"loading {settings.model or 'a new model'} ...")

    with spinner("loading the trainer"):
        from gym_fed.training.trainer import Trainer
    if is_main():
        _remember(settings.output_dir)

    with (
        readable_warnings(),
        stop_on_ctrl_c() as should_stop,
        progress(settings.logging_interval) as on_report,
    ):
        trainer = Trainer(
            settings,
            on_rows=lambda name, counts: report_rows(trainer.config.max_length)(name, counts),
            on_report=on_report,
            should_stop=should_stop,
            check=check,
        )
        result = trainer.train(resume=resume)
    if as_json:
        if is_main():
            print_json(result.summary())
        return
    for line in outcome_lines(result):
        out.print(line)
    for warning in result.check.warnings if result.check is not None else ():
        err.print(f"warning: {warning}", style="yellow")
    if settings.save_final:
        out.print(f"saved in {result.output_dir}")
        print_next(_next(settings, result.output_dir))


def _remember(folder: Path) -> None:
    """Record the run's folder for `gym webui`; without a writable home folder, warn that it will not be listed."""
    from gym_fed.training.run.recent import remember_run

    try:
        remember_run(folder)
    except (OSError, RuntimeError) as error:
        err.print(f"note: gym webui will not list this run: {error}", markup=False)


_FLAGS = "gym train --model MODEL --data rows.jsonl"


def _require_config(config: Path) -> None:
    """Refuse a model or rows given instead of a config, and name the option for them.

    Raises:
        GymError: ``USAGE``.
    """
    if config.name.endswith((".jsonl", ".jsonl.gz", ".csv", ".tsv", ".parquet", ".txt")):
        raise GymError(
            ErrorCode.USAGE,
            f"{config}: this is a data file, not a config",
            f"pass it with a flag: gym train --model MODEL --data {config}",
        )
    if str(config) == "gym-nano" or (config / "config.json").is_file():
        raise GymError(
            ErrorCode.USAGE,
            f"{config}: this is a model, not a config",
            f"pass it with a flag: gym train --model {config} --data rows.jsonl",
        )


def _preprocess(settings: TrainingConfig, as_json: bool) -> None:
    """Encode the rows into ``tokenized_path`` and report counts by outcome."""
    from gym_fed.training.rows.preprocess import preprocess

    counts, eval_counts, index = preprocess(settings)
    report = report_rows(settings.max_length)
    report("data", counts)
    if eval_counts is not None:
        report("eval_data", eval_counts)
    if as_json:
        print_json({key: index[key] for key in ("counts", "eval_counts", "files")})
        return
    for name, sha256 in index["files"].items():
        out.print(f"{settings.tokenized_path}/{name}: sha256 {sha256}")
    out.print("to train on these rows, use the same file with: --set preprocess_only=false")


def _evaluate(settings: TrainingConfig, as_json: bool) -> None:
    """Print the evaluation results on ``eval_data``, and row counts by outcome."""
    from gym_fed.training.evaluating import evaluate

    err.print(f"loading {settings.model} ...")
    figures, counts = evaluate(settings)
    report_rows(settings.max_length)("eval_data", counts)
    print_result(as_json, figures, *(f"{name:28} {value:.4f}" for name, value in figures.items()))


def _print_plan(settings: TrainingConfig, processes: int, check: bool, as_json: bool) -> None:
    """Print the memory and time of a run with its defaults, without loading or writing anything."""
    from gym_fed.training.defaults import with_defaults
    from gym_fed.training.planning.plan import plan_run

    err.print("planning; timing a step of a few layers on this machine ...")
    plan = plan_run(with_defaults(settings, check=check), processes=processes)
    print_result(as_json, plan.facts(), lambda: print_columns(plan.lines(), indent=""))


def _first_keys(parsed: ParsedConfig | None, overrides: list[str]) -> dict[str, Any]:
    """Return the first keys of the file and flags before validation."""
    from gym_fed.config.yaml.file import parse_overrides

    settings = {str(path[0]): value for path, value in parse_overrides(overrides) if len(path) == 1}
    return {**(parsed.values if parsed is not None else {}), **settings}


def _require_plugins(given: dict[str, Any]) -> None:
    """Refuse to resume without the plug-ins that the run began with: its config would have unknown keys."""
    from gym_fed.config.schema.plugins import require_run_plugins

    if isinstance(folder := given.get("output_dir"), str):
        require_run_plugins(Path(folder))


def _named_model(given: dict[str, Any]) -> str | None:
    """Return the model in a file or the flags, under gym-fed's or LLaMA-Factory's keys."""
    name = given.get("model", given.get("model_name_or_path"))
    return name if isinstance(name, str) else None


def _next(settings: TrainingConfig, folder: Path) -> str:
    """Suggest what to do with a trained model."""
    advice: str = ALGORITHMS.type_of(settings.algorithm).advice(str(folder))
    return advice


def _print_launch(
    name: str, settings: TrainingConfig, config: Path | None, options: list[str], size: tuple[int, int]
) -> None:
    """Print what a scheduler runs, after checking that the processes can work."""
    from gym_fed.training.launch.base import ClusterJob
    from gym_fed.training.run.checks import check_config

    scheduler = SCHEDULERS.new(name)
    if config is None:
        raise GymError(
            ErrorCode.USAGE, f"--launch {name} needs a CONFIG file", "write the flags into a YAML file"
        )
    nodes, nproc = size
    check_config(settings, num_processes=nodes * nproc)
    typer.echo(scheduler.text(ClusterJob(settings, config, options, nodes, nproc)), nl=False)
    err.print(f"save it as a file, review it, and run: {scheduler.submit}")


def _in_processes(settings: TrainingConfig, nproc: int, machines: Machines, overwrite: bool) -> NoReturn:
    """Run this command in ``nproc`` processes here, after checking that they can work."""
    from gym_fed.training.processes.ranks import launch
    from gym_fed.training.run.checks import check_config

    if overwrite and machines.count > 1:
        reason = "--overwrite: several machines would delete each other's run"
        raise GymError(
            ErrorCode.USAGE, reason, f"delete {settings.output_dir} once, before starting any of them"
        )
    check_config(settings, num_processes=nproc * machines.count)
    if machines.count > 1:
        err.print(f"waiting for {counted(machines.count, 'machine')} at {machines.endpoint} ...")
    sys.exit(launch(_without_launching(sys.argv[1:]), nproc, machines))


def _without_launching(words: list[str]) -> list[str]:
    """Return a command line for each of the processes: without the options that start them, and ``--overwrite``."""
    kept, rest = [], iter(words)
    for word in rest:
        name, equals, _ = word.partition("=")
        if name in ("--nproc", "--nnodes", "--rdzv-endpoint"):
            if not equals:
                next(rest)  # the option's value
        elif word != "--overwrite":
            kept.append(word)
    return kept


_PROMPT_CHARACTERS = 120
_ANSWER_CHARACTERS = 240


def outcome_lines(result: TrainResult) -> list[str]:
    """Summarise steps and loss of a run and, if it was checked, gain and retention."""
    rows = f"{counted(result.steps, 'step')} on {counted(result.num_examples, 'example')}"
    lines = [f"{rows}, {counted(result.num_tokens, 'token')}; {_loss_trend(result.losses)}"]
    if result.privacy is not None:
        lines[0] += f"; privacy: epsilon {result.epsilon:.2f} at delta {result.privacy.target_delta:g}"
    return lines if result.check is None else [*lines, *_check_lines(result.check)]


def _loss_trend(losses: list[float]) -> str:
    """Describe the loss of the last step, and the means of the first and last tenth of the steps."""
    count = max(1, len(losses) // 10)
    first, last = sum(losses[:count]) / count, sum(losses[-count:]) / count
    if len(losses) < 2:
        return f"loss {losses[-1]:.4f}"
    means = f"means of the first and last {counted(count, 'step')}"
    basis = "first and last step, on different rows" if count == 1 else means
    return f"loss {first:.4f} -> {last:.4f} ({basis})"


def _check_lines(check: CheckResult) -> list[str]:
    """Return the lines of a run's check without its warnings."""
    lines = []
    if (held := check.held_out) is not None:
        rows = counted(held.num_rows, "held-out row") if held.num_rows else "held-out rows"
        change = (
            "" if held.stderr is None else f" (change {held.after - held.before:+.4f} ± {held.stderr:.4f})"
        )
        lines.append(f"{rows}: loss {held.before:.4f} -> {held.after:.4f}{change}")
    if (retention := check.retention) is not None:
        lines.append(retention.describe())
    shown = zip(check.prompts, check.expected, check.before, check.after, strict=True)
    for prompt, expected, before, after in shown:
        lines.append(f"> {_line(prompt, _PROMPT_CHARACTERS)}")
        lines.append(f"  row:    {_line(expected, _ANSWER_CHARACTERS)}")
        lines.append(f"  before: {_line(before, _ANSWER_CHARACTERS)}")
        lines.append(f"  after:  {_line(after, _ANSWER_CHARACTERS)}")
    return lines + [f"not checked: {what}" for what in check.skipped]


def _line(text: str, max_chars: int) -> str:
    return plain(" ".join(text.split()), max_chars) or "(nothing)"
