"""`gym batch`: answer a file of requests in OpenAI's batch format with a model on this machine."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gym_fed.cli.models.needed import YesOption, ensure_models
from gym_fed.cli.options import BaseOption
from gym_fed.cli.train.progress import duration
from gym_fed.core.console import AsJson, err, print_result
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.core.files import real_path
from gym_fed.core.help import AdapterOption, ChatTemplateOption, ServedVariants, SetOption
from gym_fed.core.progress import progress_bar
from gym_fed.core.text import counted

if TYPE_CHECKING:
    from gym_fed.config.serving import EngineConfig, ServingConfig
    from gym_fed.serving.batch_input import BatchInput
    from gym_fed.serving.batch_run import BatchOutput, BatchReport
    from gym_fed.serving.setup import Serving


def batch(
    source: Annotated[Path, typer.Argument(metavar="IN.jsonl", help="Requests, one JSON object per line.")],
    target: Annotated[
        Path,
        typer.Argument(
            metavar="OUT.jsonl", help="Answers, in order of completion; an existing file is continued."
        ),
    ],
    base: BaseOption = None,
    adapter: AdapterOption = None,
    variants: ServedVariants = None,
    chat_template: ChatTemplateOption = None,
    config: Annotated[
        Path | None, typer.Option("--config", metavar="FILE", help="Config of `gym api`.")
    ] = None,
    overrides: SetOption = None,
    errors: Annotated[
        Path | None,
        typer.Option("--errors", metavar="FILE", help="Write failed requests to this file instead of OUT."),
    ] = None,
    seed: Annotated[int, typer.Option("--seed", min=0, help="Sampling seed for requests without one.")] = 0,
    yes: YesOption = False,
    as_json: AsJson = False,
) -> None:
    """Answer a file of requests. The same command resumes after Ctrl-C or a crash."""
    from gym_fed.cli.api.settings import serving_config, with_own_variants

    named = {
        "base": base,
        "adapter": adapter,
        "chat_template": chat_template,
        "variants": str(variants) if variants is not None else None,
    }
    named_overrides = [f"{key}={json.dumps(value)}" for key, value in named.items() if value is not None]
    settings = with_own_variants(serving_config(config, [*(overrides or []), *named_overrides]))
    _refuse_same_file(source, target, errors)

    from gym_fed.serving.batch_input import check_body, check_input
    from gym_fed.serving.batch_run import BatchOutput

    given = check_input(source, check_body)
    if settings.chat_template is not None:
        from gym_fed.data.chat_templates.choice import read_chat_template

        read_chat_template(settings.chat_template)  # raises for an invalid template before a model is loaded
    ensure_models([settings.base, *settings.adapter], yes)
    identity = _identity(settings, given, seed)
    with BatchOutput(target, errors, belongs_to=identity, custom_ids=frozenset(given.custom_ids)) as output:
        left = len(given.custom_ids) - len(output.done)
        err.print(f"{given.path}: {counted(len(given.custom_ids), 'request')}, {left} to do", style="dim")
        try:
            report = _run(settings, given, output, seed)
        except KeyboardInterrupt:
            raise GymError(
                ErrorCode.INTERRUPTED,
                f"stopped: answered {len(output.done)} of {counted(len(given.custom_ids), 'request')}",
                "run the same command again to continue",
            ) from None
    _print_report(report, target, errors, as_json)


def _run(settings: ServingConfig, given: BatchInput, output: BatchOutput, seed: int) -> BatchReport:
    """Answer the requests that have no output line; no model is loaded if all have one."""
    from gym_fed.serving.batch_run import BatchReport, run_batch

    done = len(output.done)
    if done == len(given.custom_ids):
        return BatchReport(done, done, output.num_failed, resumed=done)

    from gym_fed.serving.chat.local_writer import require_store
    from gym_fed.serving.openai.catalogue import LOCAL
    from gym_fed.serving.setup import open_serving

    require_store(settings.variants)
    with open_serving(settings) as serving:
        service = serving.service
        given.require_models(
            lambda name: service.catalogue.resolve(name, LOCAL),
            lambda: [model.name for model in service.catalogue.list(LOCAL)],
        )
        output.pin({"base_digest": serving.base.digest, "variants": _versions(serving, given)})
        with progress_bar("batch", keep=True) as update:
            return run_batch(
                given,
                output,
                lambda url, body: service.handle(url, body, LOCAL),
                at_once=_num_in_progress(settings.engine),
                seed=seed,
                on_report=lambda report: update(report.done, report.total, note=_figures(report)),
                on_stop=serving.engine.close,
            )


def _print_report(report: BatchReport, target: Path, errors: Path | None, as_json: bool) -> None:
    """Print the summary; exit with a special code if requests failed."""
    print_result(
        as_json,
        {
            "total": report.total,
            "succeeded": report.done - report.failed,
            "failed": report.failed,
            "resumed": report.resumed,
            "prompt_tokens": report.prompt_tokens,
            "completion_tokens": report.completion_tokens,
            "seconds": round(report.seconds, 3),
            "tokens_per_second": round(report.tokens_per_second, 3),
            "output": str(target),
            "errors": str(errors) if errors else None,
        },
        f"{counted(report.done - report.failed, 'answer')} in {target}",
    )
    if report.failed:
        where = errors or target
        err.print(f"{report.failed} of {counted(report.total, 'request')} failed: see {where}")
        raise typer.Exit(ErrorCode.DATA_INVALID.exit_code)


def _identity(settings: ServingConfig, given: BatchInput, seed: int) -> dict[str, Any]:
    """Return the settings that an answer depends on and that are known before the model is loaded."""
    return {
        "input_sha256": given.sha256,
        "base": settings.base,
        **({"adapter": settings.adapter} if settings.adapter else {}),
        **({"chat_template": settings.chat_template} if settings.chat_template else {}),
        "served_name": settings.served_name,
        "dtype": settings.dtype,
        "device": settings.device,
        "kernel": settings.engine.kernel,
        "max_context": settings.engine.max_context,
        "seed": seed,
        **({"filter": settings.filter.model_dump(mode="json")} if settings.filter.on else {}),
    }


def _versions(serving: Serving, given: BatchInput) -> dict[str, str]:
    """Return the SHA-256 of each variant that the input names."""
    names = [name.partition(":")[2] for name in given.models if ":" in name]
    return {name: serving.store.get(name).sha256 for name in names} if serving.store is not None else {}


def _num_in_progress(engine: EngineConfig) -> int:
    """Return the maximum number of requests in progress: running ones, and as many whose variants are being loaded."""
    queued = min(engine.max_queued, engine.max_queued_per_user, engine.max_concurrent)
    return engine.max_concurrent + queued


def _refuse_same_file(source: Path, target: Path, errors: Path | None) -> None:
    named = [real_path(path.expanduser()) for path in (source, target, errors) if path is not None]
    if len(set(named)) != len(named):
        raise GymError(
            ErrorCode.USAGE, "IN, OUT and --errors must be different files", "choose a different file"
        )


def _figures(report: BatchReport) -> str:
    parts = [f"{report.failed} failed", f"{report.tokens_per_second:.0f} tokens/s"]
    if report.seconds_left is not None and report.done < report.total:
        parts.append(f"{duration(report.seconds_left)} left")
    return "  ".join(parts)
