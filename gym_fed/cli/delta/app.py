"""`gym delta`: create, show and apply `.gymdelta` files."""

from __future__ import annotations

import math
import os
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gym_fed.cli.delta.encode import draw_errors, encode, print_errors, require_matplotlib
from gym_fed.cli.options import LIMIT, BaseArgument, PlotOption, TunedArgument
from gym_fed.core import console
from gym_fed.core.console import AsJson
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.core.help import App
from gym_fed.core.text import counted, plain

if TYPE_CHECKING:
    from gym_fed.delta.file import DeltaFile
    from gym_fed.evaluation.merge_statistics import LayerError


app = App(help="Create, show and apply .gymdelta files.", no_args_is_help=True)
app.command()(encode)


@app.command()
def compare(
    base: BaseArgument,
    tuned: TunedArgument,
    files: Annotated[
        list[Path], typer.Argument(metavar="FILE...", help=".gymdelta files made from this pair.")
    ],
    data: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Text to measure the layers' outputs on, in addition to the weights."
        ),
    ] = None,
    limit: Annotated[int, LIMIT] = 64,
    plot: PlotOption = None,
    json_: AsJson = False,
) -> None:
    """Show the bits, weight error and output error of every layer."""
    from gym_fed.base.modeling.adapters import merged
    from gym_fed.base.modeling.differences import require_same_settings
    from gym_fed.base.models import load_model, load_tuned, model_name
    from gym_fed.data.reading import load_rows
    from gym_fed.delta.base import BaseSpec, model_tensors
    from gym_fed.delta.file import DeltaFile
    from gym_fed.evaluation.merge_statistics import layer_errors

    if plot is not None:
        require_matplotlib()
    rows = load_rows(data)[:limit] if data else []
    loaded, other = load_model(base), load_tuned(tuned, base)
    tokenizers = (loaded.tokenizer, other.tokenizer)
    for difference in require_same_settings(
        tuned, loaded.model, other.model, tokenizers, allow=True, added_tokens=True
    ):
        console.err.print(f"not in a delta: {difference}", markup=False)
    new: Any = merged(other.model, tuned)
    spec, tensors = BaseSpec.of(loaded.model, model_name(base)), model_tensors(loaded.model)
    errors_by_file: dict[str, list[LayerError]] = {}
    bits: dict[str, float] = {}
    for file in files:
        with DeltaFile.open(file, spec, added_tokens=True) as delta:
            errors_by_file[str(file)] = layer_errors(new, tensors, delta, loaded.tokenizer, rows)
            bits[str(file)] = delta.bits_per_weight
    if json_:
        console.print_json(
            {
                name: {"bits_per_weight": bits[name], "tensors": [_without_nan(error) for error in errors]}
                for name, errors in errors_by_file.items()
            }
        )
    else:
        for name, errors in errors_by_file.items():
            print_errors(name, bits[name], errors)
    if plot is not None:
        draw_errors(plot, errors_by_file)


@app.command()
def show(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A .gymdelta file.")], json_: AsJson = False
) -> None:
    """Verify a delta and show its contents."""
    from gym_fed.delta.file import DeltaFile

    with DeltaFile.open(file, added_tokens=True) as delta:
        summary = _summary(delta)
    console.print_result(json_, summary, lambda: _print_summary(summary))


@app.command()
def apply(
    base: BaseArgument,
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A .gymdelta file made from this base.")],
    output: Annotated[
        Path, typer.Option("--output", "-o", metavar="FOLDER", help="New folder for the model.")
    ],
    scale: Annotated[float, typer.Option(help="Factor to multiply the delta by.")] = 1.0,
    json_: AsJson = False,
) -> None:
    """Write BASE plus the delta as a model folder that transformers loads."""
    from gym_fed.base.models import load_model, model_name, quiet_loading
    from gym_fed.delta.base import BaseSpec, model_tensors
    from gym_fed.delta.file import DeltaFile
    from gym_fed.delta.kept import kept_text, share_applied
    from gym_fed.delta.vocabulary import apply_with_tokens

    if output.exists():
        raise GymError(ErrorCode.FILE_EXISTS, f"{output} exists", "choose a folder that does not exist yet")
    loaded = load_model(base)
    spec = BaseSpec.of(loaded.model, model_name(base))
    tensors = model_tensors(loaded.model)
    dtype = str(next(iter(tensors.values())).dtype).removeprefix("torch.")
    with DeltaFile.open(file, spec, added_tokens=True) as delta:
        kept = share_applied(tensors, delta, scale)
    loaded = apply_with_tokens(loaded, file, spec, scale)
    output.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=f".{output.name}.", dir=output.parent))
    try:
        with quiet_loading():
            loaded.model.save_pretrained(scratch)
            loaded.tokenizer.save_pretrained(scratch)
        scratch.chmod(0o755)
        os.rename(scratch, output)
    except BaseException:
        shutil.rmtree(scratch, ignore_errors=True)
        raise
    console.print_result(
        json_,
        {
            "folder": str(output),
            "base": spec.digest,
            "delta": str(file),
            "scale": scale,
            "dtype": dtype,
            "kept": kept,
        },
        f"wrote {output}; {kept_text(kept, dtype) or 'the delta changes nothing'}",
    )


def _summary(delta: DeltaFile) -> dict[str, Any]:
    tensors = []
    for name in delta.names:
        record, payload = delta.record(name), delta.payload(name)
        scale = float(payload["scales"].float().mean()) if "scales" in payload else None
        tensors.append(
            {
                "name": name,
                "shape": list(record.shape),
                "codec": record.codec,
                "params": record.params,
                "scale": scale,
                "norm": delta.tensor_norm(name),
                "bytes": delta.payload_bytes(name),
                "bits_per_weight": 8.0 * delta.payload_bytes(name) / math.prod(record.shape),
            }
        )
    payload_bytes = sum(delta.payload_bytes(record.name) for record in delta.manifest.tensors)
    return {
        "file": str(delta.path),
        "sha256": delta.sha256(),
        "base_model": delta.manifest.base_model,
        "base_digest": delta.manifest.base_digest,
        "extra": delta.manifest.extra,
        "vocabulary": _vocabulary(delta),
        "tensors": tensors,
        "num_weights": delta.num_weights,
        "size_bytes": delta.size_bytes,
        "header_bytes": delta.size_bytes - payload_bytes,
        "bits_per_weight": delta.bits_per_weight,
        "norm": delta.norm(),
    }


def _vocabulary(delta: DeltaFile) -> dict[str, Any] | None:
    """Describe the added tokens and rows; None if there are none."""
    from gym_fed.delta.added_tokens import rows_name, unnamed_rows

    tokens, rows = delta.vocabulary, delta.added_rows
    if not tokens and rows is None:
        return None
    added, changed = (
        [{"id": token.id, "token": token.text, "flags": list(token.flags)} for token in group]
        for group in (tokens.tokens, tokens.changed)
    )
    facts: dict[str, Any] = {"tokens": added, "changed": changed, "roles": dict(tokens.roles), "rows": None}
    if rows is not None:
        facts["rows"] = {
            "first": rows.first,
            "size": rows.size,
            "without_token": unnamed_rows(rows.first, rows.size, (t.id for t in tokens.tokens)),
            "bytes": sum(delta.payload_bytes(rows_name(name, rows.first)) for name in rows.names),
            "tensors": list(rows.names),
        }
    return facts


def _print_vocabulary(vocabulary: dict[str, Any]) -> None:
    for token in vocabulary["tokens"] + vocabulary["changed"]:
        flags = " ".join(token["flags"])
        console.out.print(f"token   {token['id']} {plain(token['token'], 60)!r} {flags}".rstrip())
    for role, text in sorted(vocabulary["roles"].items()):
        console.out.print(f"token   {role}: {plain(text, 60)!r}")
    if (rows := vocabulary["rows"]) is not None:
        padding = f"; without a token: {rows['without_token']}" if rows["without_token"] else ""
        console.out.print(
            f"rows    {rows['first']} to {rows['size'] - 1} of {', '.join(rows['tensors'])}, as values, "
            f"{counted(rows['bytes'], 'byte')}{padding}"
        )


def _print_summary(summary: dict[str, Any]) -> None:
    rows = [("tensor", "shape", "codec", "bits", "scale", "norm", "bytes")]
    for tensor in summary["tensors"]:
        options = " ".join(f"{key}={value}" for key, value in sorted(tensor["params"].items()))
        scale = "-" if tensor["scale"] is None else f"{tensor['scale']:.4g}"
        shape = "x".join(str(side) for side in tensor["shape"]) or "scalar"
        codec = f"{tensor['codec']} {options}".rstrip()
        bits = f"{tensor['bits_per_weight']:.2f}"
        rows.append(
            (tensor["name"], shape, codec, bits, scale, f"{tensor['norm']:.4g}", f"{tensor['bytes']:,}")
        )
    console.print_columns(rows, indent="")
    console.out.print(f"base    {plain(summary['base_model'])} {summary['base_digest']}")
    for key, value in sorted(summary["extra"].items()):
        console.out.print(f"extra   {plain(key)}: {plain(repr(value), 1000)}")
    if summary["vocabulary"] is not None:
        _print_vocabulary(summary["vocabulary"])
    console.out.print(
        f"total   {counted(len(summary['tensors']), 'tensor')}, {counted(summary['num_weights'], 'weight')}, "
        f"{counted(summary['size_bytes'], 'byte')} ({summary['header_bytes']:,} of header), "
        f"{summary['bits_per_weight']:.3f} bits per weight, norm {summary['norm']:.4g}"
    )
    console.out.print(f"sha256  {summary['sha256']}")


def _without_nan(error: LayerError) -> dict[str, Any]:
    return {k: None if isinstance(v, float) and math.isnan(v) else v for k, v in vars(error).items()}
