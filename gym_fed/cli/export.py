"""`gym export`: a model, run or adapter as a folder that other programs read."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from gym_fed.cli.models.needed import YesOption, ensure_models
from gym_fed.console import AsJson, err, print_result
from gym_fed.errors import ErrorCode, GymError


def export(
    model: Annotated[
        str,
        typer.Argument(
            help="gym-nano, a model folder, the output_dir of a run, an adapter's folder, "
            "or a LLaMA-Factory file that merges."
        ),
    ],
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="PATH", help="New folder (or file) to write.")
    ] = None,
    adapter: Annotated[
        list[str] | None,
        typer.Option("--adapter", metavar="DIR", help="Put this adapter on; may be repeated, in order."),
    ] = None,
    format_: Annotated[
        str, typer.Option("--format", metavar="FORMAT", help="huggingface, adapter or delta.")
    ] = "huggingface",
    dtype: Annotated[
        str | None,
        typer.Option(
            "--dtype",
            help="float32, bfloat16 or float16.",
            show_default="as the base is stored; adapters as they are",
        ),
    ] = None,
    shard_size: Annotated[
        str, typer.Option("--shard-size", help="Most bytes of one weights' file, such as 500MB.")
    ] = "5GB",
    skip_check: Annotated[
        bool, typer.Option("--skip-check", help="Do not read it back in a fresh process and compare.")
    ] = False,
    yes: YesOption = False,
    as_json: AsJson = False,
) -> None:
    """Merge a model's adapters and write it for other programs; it is read back and compared before it counts."""
    from gym_fed.config.serving import parse_bytes
    from gym_fed.export.formats.base import Options
    from gym_fed.export.run import export as write
    from gym_fed.export.run import format_named
    from gym_fed.export.source import open_source
    from gym_fed.models import DTYPES

    if model.endswith((".yaml", ".yml")):
        _refuse_beside_a_file({"--output": output, "--adapter": adapter, "--dtype": dtype})
        values = _of_file(model)
        model, adapter, output = values["model"], values["adapter"], Path(values["output"])
        dtype, shard_size = values.get("dtype"), values["shard_size"]
    if output is None:
        raise GymError(ErrorCode.USAGE, "where to? --output is missing", "name a new folder: -o FOLDER")
    if dtype is not None and dtype not in DTYPES:
        raise GymError(ErrorCode.USAGE, f"--dtype {dtype!r} is unknown", f"one of {', '.join(DTYPES)}")
    try:
        parse_bytes(shard_size)
    except ValueError as error:
        raise GymError(ErrorCode.USAGE, f"--shard-size: {error}") from error
    format_named(format_)
    if output.exists():
        raise GymError(ErrorCode.FILE_EXISTS, f"{output} exists", "choose another name")
    ensure_models([model, *(adapter or ())], yes)
    err.print(f"loading {model} ...")
    source = open_source(model, adapter or ())
    kept = source.dtype if format_ == "huggingface" else None
    options = Options(dtype=dtype or kept, shard_size=shard_size)
    record = write(source, format_, output, options, check=not skip_check)
    print_result(as_json, {**record, "output": str(output)}, f"{output}: {_said(record)}")


def _refuse_beside_a_file(options: dict[str, object]) -> None:
    for name, value in options.items():
        if value is not None:
            raise GymError(ErrorCode.USAGE, f"{name} does not go with a file", "write it in the file")


def _of_file(file: str) -> dict[str, Any]:
    """What a LLaMA-Factory file merges."""
    from gym_fed.config.llamafactory.files import load_export

    values, notes = load_export(file)
    for note in notes:
        err.print(f"note: {note}")
    return values


def _said(record: dict[str, Any]) -> str:
    """What the comparison came to, in a line."""
    check = record["check"]
    if check is None:
        return "written, and not compared with its source"
    back, source = check["read_back"], check.get("against_the_source")
    text = f"read back by {check['read_by']}, logits at most {back['max']:.2g} off"
    if source is not None and "max" in source:
        text += (
            f"; against the source {source['max']:.2g} off, likeliest token the same at {source['top1']:.1%}"
        )
    return text
