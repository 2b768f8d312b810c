"""`gym export`: write a model, run or adapter in a format that other programs read."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

from gym_fed.cli.completion import models, variants
from gym_fed.cli.models.needed import YesOption, ensure_models
from gym_fed.cli.next_command import print_next
from gym_fed.cli.options import refuse_options
from gym_fed.core.console import AsJson, MemberName, err, print_columns, print_result
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.core.help import AdapterOption, ServedVariants
from gym_fed.core.progress import progress_bar
from gym_fed.core.registries import EXPORT_FORMATS
from gym_fed.core.text import parse_bytes, readable_bytes


def export(
    model: Annotated[
        str | None,
        typer.Argument(
            help="Model folder or name, output_dir of a run, adapter, BASE:VARIANT, .gymdelta or LLaMA-Factory file.",
            autocompletion=models,
        ),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            metavar="PATH",
            help="New file or folder; its suffix selects the format.",
            show_default="MODEL's name",
        ),
    ] = None,
    format_: Annotated[
        str | None,
        typer.Option(
            "--format",
            click_type=MemberName(EXPORT_FORMATS, checked=False),
            help="Format to write: gguf, huggingface, adapter, ...; see --list.",
            show_default="by the suffix of --output, else huggingface",
        ),
    ] = None,
    quantization: Annotated[
        str,
        typer.Option(
            "--quantization",
            metavar="NAME",
            help="Quantization of the weights, such as q8_0 for gguf; see --list.",
            show_default="the source's own precision",
        ),
    ] = "",
    adapter: AdapterOption = None,
    variant: Annotated[
        str | None,
        typer.Option("--variant", metavar="NAME", help="Variant of MODEL.", autocompletion=variants),
    ] = None,
    variants: ServedVariants = None,
    base: Annotated[
        str | None,
        typer.Option(
            "--base",
            metavar="MODEL",
            help="Base of MODEL, if that is a .gymdelta or an adapter.",
            show_default="the base it was made from",
        ),
    ] = None,
    dtype: Annotated[
        str | None,
        typer.Option(
            "--dtype",
            metavar="DTYPE",
            help="Data type: float32, bfloat16 or float16.",
            show_default="the base's, if it keeps 99% of the delta",
        ),
    ] = None,
    rank: Annotated[
        int | None,
        typer.Option("--rank", min=1, help="Rank of the adapter to write.", show_default="32, or its own"),
    ] = None,
    data: Annotated[
        str | None,
        typer.Option(
            "--data", metavar="FILE", help="Rows to calibrate awq and gptq with, or to measure an adapter."
        ),
    ] = None,
    shard_size: Annotated[
        str,
        typer.Option("--shard-size", metavar="SIZE", help="Maximum size of each weight file, such as 500MB."),
    ] = "5GB",
    skip_check: Annotated[
        bool, typer.Option("--skip-check", help="Skip loading the result in a new process for comparison.")
    ] = False,
    list_: Annotated[
        bool, typer.Option("--list", help="List the formats, what reads them, and what they need.")
    ] = False,
    yes: YesOption = False,
    as_json: AsJson = False,
) -> None:
    """Merge a model's adapters and write it for other programs; it is read back and checked before it is kept."""
    from dataclasses import replace

    from gym_fed.base.models import DTYPES, model_name
    from gym_fed.data.reading import load_rows
    from gym_fed.export.choice import formats, resolve_format
    from gym_fed.export.formats.base import Options, require_room
    from gym_fed.export.needs import weights_of
    from gym_fed.export.run import export as write
    from gym_fed.export.run import require_new
    from gym_fed.export.source import open_source
    from gym_fed.serving.store.naming import base_needed, named_delta

    if list_:
        rows = formats()
        print_result(as_json, rows, lambda: _print_formats(rows))
        return
    if model is None:
        raise GymError(
            ErrorCode.USAGE, "MODEL is missing", "gym export MODEL -o FOLDER; formats: gym export --list"
        )
    if model.endswith((".yaml", ".yml")):
        given: dict[str, object] = {"--output": output, "--adapter": adapter, "--dtype": dtype}
        given |= {"--format": format_, "--quantization": quantization or None, "--data": data}
        given |= {"--variant": variant, "--variants": variants, "--base": base, "--rank": rank}
        refuse_options(given, "cannot be combined with a file", "set it in the file")
        values = _export_settings(model)
        model, adapter, output = values["model"], values["adapter"], Path(values["output"])
        dtype, shard_size = values.get("dtype"), values["shard_size"]
        format_, quantization, data = values.get("format"), values.get("quantization", ""), values.get("data")
    if dtype is not None and dtype not in DTYPES:
        raise GymError(ErrorCode.USAGE, f"--dtype {dtype!r} is unknown", f"one of {', '.join(DTYPES)}")
    try:
        parse_bytes(shard_size)
    except ValueError as error:
        raise GymError(ErrorCode.USAGE, f"--shard-size: {error}") from error
    options = Options(
        dtype=dtype,
        shard_size=shard_size,
        quantization=quantization,
        rank=rank,
        rows_name=model_name(data) if data else "",
    )
    chosen, options = resolve_format(format_, output, options)
    if dtype is not None and not chosen.takes_dtype:
        names = ", ".join(chosen.quantizations)
        remedy = f"--quantization sets how weights are stored: {names}" if names else "leave it out"
        raise GymError(ErrorCode.USAGE, f"format {chosen.name} has no --dtype", remedy)
    if output is None:
        if not chosen.suffix:
            raise GymError(ErrorCode.USAGE, "--output is missing", "pass a new folder: -o FOLDER")
        output = Path(Path(model).name + chosen.suffix)
    require_new(output, chosen)
    with _sigterm_interrupts(), progress_bar() as update, options.processes:

        def report(stage: str, done: int, total: int) -> None:
            update(done, total, description=stage)

        ensure_models([base_needed(model, base), *(adapter or ())], yes)
        calibration = load_rows(data) if data is not None else ()
        delta = named_delta(model, base=base, variant=variant, store=variants)
        weights = weights_of((base or model) if delta is None else delta.base)
        require_room(chosen, weights, output, options, check=not skip_check)
        chosen.start(options.processes, check=not skip_check)
        report(f"loading {model}", 0, 0)
        source = open_source(model, adapter or (), base=base, variant=variant, variants=variants)
        options = replace(options, rows=calibration, report=report)
        record = write(source, chosen.name, output, options, check=not skip_check)
    for note in record.get("notes", ()):
        err.print(f"note: {note}")
    print_result(as_json, {**record, "output": str(output)}, f"{output}: {_summary(record)}")
    if not as_json:
        options = replace(options, quantization=record.get("quantization", ""))
        if smaller := chosen.suggestion(output, options):
            err.print(f"hint: {smaller}")
        print_next(chosen.use(output))


@contextmanager
def _sigterm_interrupts() -> Iterator[None]:
    """Treat SIGTERM in the block like Ctrl-C, so that unfinished files and child processes are removed."""

    def stop(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    previous = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)


def _export_settings(file: str) -> dict[str, Any]:
    """Load the export settings of a LLaMA-Factory file."""
    from gym_fed.config.training_file import load_export

    values, notes = load_export(file)
    for note in notes:
        err.print(f"note: {note}")
    return values


def _summary(record: dict[str, Any]) -> str:
    """Summarize size, time and the comparison with the source in one line."""
    check, unchecked = record["check"], record["unchecked"]
    text = f"{readable_bytes(record['bytes'])} in {record['seconds']['all']:.0f} s, "
    if (kept := record.get("kept")) is not None:
        text += f"keeps {kept['share']:.1%} of the {kept['of']} in {kept['stored_as']}, "
    if check is None:
        return f"{text}not compared with its source: {unchecked}"
    text += f"read back by {check['read_by']}, {_distance(check['read_back'])}"
    source = check.get("against_the_source")
    if source is not None and "max" in source:
        text += f"; against the source {_distance(source)}"
    return f"{text}; {unchecked}" if unchecked else text


def _distance(figures: dict[str, Any]) -> str:
    """Describe the difference between two sets of logits; the largest logit is shown, since logits have no unit."""
    if not figures["max"]:
        return "the same logits"
    return (
        f"logits differ by at most {figures['max']:.2g} (largest: {figures['largest']:.2g}), "
        f"same top token at {figures['top1']:.1%} of positions"
    )


def _print_formats(rows: list[dict[str, Any]]) -> None:
    """Print the table of `gym export --list`."""
    lines: list[tuple[str, str]] = []
    for row in rows:
        missing = f" (not installed: {', '.join(row['missing'])})" if row["missing"] else ""
        facts = [
            f"read back by {row['read_by']}" if row["read_by"] else "",
            f"-o NAME{row['suffix']}" if row["suffix"] else "",
            f"needs {', '.join(row['needs'])}{missing}" if row["needs"] else "",
        ]
        quantizations = f" [{', '.join(row['quantizations'])}]" if row["quantizations"] else ""
        lines += [(row["format"], f"{row['writes']}{quantizations}"), ("", "; ".join(filter(None, facts)))]
    print_columns(lines, wrapped=True)
