"""`gym soup statistics`: what `fisher` and `regmean` want to know of a model, from data of its own."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from gym_fed import console
from gym_fed.console import AsJson


def statistics(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="The fine-tune: a folder or a LoRA run.")],
    data: Annotated[Path, typer.Option(help="Rows of the kind it was trained on.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="The .safetensors to write.")],
    kind: Annotated[
        Literal["fisher", "moments"], typer.Option(help="fisher for fisher, moments for regmean.")
    ],
    max_examples: Annotated[int, typer.Option(min=1, help="Rows of --data to use.")] = 256,
    max_length: Annotated[int, typer.Option(min=2, help="Rows are cut to so many tokens.")] = 256,
    force: Annotated[bool, typer.Option("--force", help="Overwrite the output.")] = False,
    json_: AsJson = False,
) -> None:
    """Measure Fisher diagonals, or second moments of the layers' inputs, of MODEL on data."""
    from gym_fed.data.reading import load_rows
    from gym_fed.errors import ErrorCode, GymError
    from gym_fed.evaluation.merge_statistics import fisher_diagonals, input_moments, save_statistics
    from gym_fed.models import load_model

    if output.exists() and not force:
        raise GymError(ErrorCode.FILE_EXISTS, f"{output} exists", "choose another name, or pass --force")
    rows = load_rows(data)[:max_examples]
    loaded = load_model(model)
    tuned: Any = loaded.model.merge_and_unload() if hasattr(loaded.model, "peft_config") else loaded.model
    measure = fisher_diagonals if kind == "fisher" else input_moments
    found = measure(tuned, loaded.tokenizer, rows, max_length=max_length)
    save_statistics(output, kind, found)
    told = {"file": str(output), "kind": kind, "num_rows": len(rows), "num_tensors": len(found)}
    console.print_result(
        json_,
        {**told, "size_bytes": output.stat().st_size},
        f"{output}: {kind} of {len(found)} tensors on {len(rows)} rows, {output.stat().st_size:,} bytes",
    )
