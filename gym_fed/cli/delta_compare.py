"""`gym delta compare`: how far encoded deltas are from the true one, layer by layer."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gym_fed import console
from gym_fed.cli.layer_errors import draw_errors, print_errors, require_matplotlib
from gym_fed.console import AsJson

if TYPE_CHECKING:
    from gym_fed.evaluation.delta_error import LayerError


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
    json_: AsJson = False,
) -> None:
    """Show bits, error of the weights and error of the outputs of every layer."""
    from gym_fed.data.reading import load_rows
    from gym_fed.delta.base import BaseSpec, model_tensors
    from gym_fed.delta.file import DeltaFile
    from gym_fed.evaluation.delta_error import layer_errors
    from gym_fed.models import load_model, model_name

    if plot is not None:
        require_matplotlib()
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
            print_errors(file_name, totals[file_name], errors)
    if plot is not None:
        draw_errors(plot, found)


def _plain(error: LayerError) -> dict[str, Any]:
    return {k: None if isinstance(v, float) and math.isnan(v) else v for k, v in vars(error).items()}
