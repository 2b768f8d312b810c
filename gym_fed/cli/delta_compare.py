"""`gym delta compare`: how far encoded deltas are from the true one, layer by layer."""

from __future__ import annotations

import itertools
import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gym_fed import console

if TYPE_CHECKING:
    from gym_fed.evaluation import LayerError


def compare(
    base: Annotated[str, typer.Argument(metavar="BASE", help="Model folder or name of the base.")],
    tuned: Annotated[
        str, typer.Argument(metavar="TUNED", help="Model folder of the fine-tune, or a LoRA run.")
    ],
    files: Annotated[list[Path], typer.Argument(metavar="FILE...", help="Deltas made from this pair.")],
    data: Annotated[
        Path | None, typer.Option(help="Text to measure the layers' outputs on; without it, weights only.")
    ] = None,
    max_examples: Annotated[int, typer.Option(min=1, help="Rows of --data to use.")] = 64,
    plot: Annotated[Path | None, typer.Option(help="Draw the errors into this file (png, svg, pdf).")] = None,
    json_: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> None:
    """Show bits, error of the weights and error of the outputs of every layer."""
    from gym_fed.data import load_rows
    from gym_fed.delta import BaseSpec, DeltaFile, model_tensors
    from gym_fed.evaluation import layer_errors
    from gym_fed.models import load_model, model_name

    if plot is not None:
        _require_matplotlib()
    rows = load_rows(data)[:max_examples] if data else []
    loaded = load_model(base)
    new: Any = load_model(tuned).model
    if hasattr(new, "peft_config"):
        new = new.merge_and_unload()
    spec, tensors = BaseSpec.of(loaded.model, model_name(base)), model_tensors(loaded.model)
    found: dict[str, list[LayerError]] = {}
    totals: dict[str, float] = {}
    for file in files:
        with DeltaFile.open(file, spec) as delta:
            found[str(file)] = layer_errors(new, tensors, delta, loaded.tokenizer, rows)
            totals[str(file)] = delta.bits_per_weight
    if json_:
        console.print_json(
            {f: {"bits_per_weight": totals[f], "tensors": [_plain(e) for e in found[f]]} for f in found}
        )
    else:
        for file_name, errors in found.items():
            _print(file_name, totals[file_name], errors)
    if plot is not None:
        _draw(plot, found)


def _plain(error: LayerError) -> dict[str, Any]:
    return {k: None if isinstance(v, float) and math.isnan(v) else v for k, v in vars(error).items()}


def _print(name: str, bits_per_weight: float, errors: list[LayerError]) -> None:
    from rich.table import Table

    table = Table(title=f"{name}: {bits_per_weight:.3f} bits a weight, header included", title_justify="left")
    for column in ("tensor", "codec", "bits", "weight error", "output error"):
        table.add_column(column, justify="left" if column in ("tensor", "codec") else "right")
    for e in errors:
        output = "-" if e.output_error is None else _percent(e.output_error)
        table.add_row(
            e.name, e.codec or "left out", f"{e.bits_per_weight:.2f}", _percent(e.weight_error), output
        )
    console.out.print(table)


def _percent(value: float) -> str:
    return "unchanged" if math.isnan(value) else f"{100 * value:.1f}%"


def _require_matplotlib() -> None:
    from importlib.util import find_spec

    from gym_fed.errors import ErrorCode, GymError

    if find_spec("matplotlib") is None:
        raise GymError(
            ErrorCode.MISSING_DEPENDENCY, "--plot: matplotlib is not installed", "pip install 'gym-fed[plot]'"
        )


def _draw(path: Path, found: dict[str, list[LayerError]]) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    names = [e.name for e in next(iter(found.values()))]
    figure, axes = pyplot.subplots(figsize=(8, 1 + 0.22 * len(names)), layout="constrained")
    for marker, (name, errors) in zip(itertools.cycle("osv^D*"), found.items(), strict=False):
        axes.plot(
            [100 * e.weight_error for e in errors], names, marker, label=f"{name}: weights", fillstyle="none"
        )
        if any(e.output_error is not None for e in errors):
            outputs = [math.nan if e.output_error is None else 100 * e.output_error for e in errors]
            axes.plot(outputs, names, marker, label=f"{name}: outputs")
    axes.set_xlabel("relative error, %")
    axes.invert_yaxis()
    axes.grid(alpha=0.3)
    axes.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0))
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
    console.err.print(f"wrote {path}", markup=False)
