"""Errors of a delta's tensors as a table and as a picture; used by `gym delta encode` and `gym delta compare`."""

from __future__ import annotations

import itertools
import math
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from gym_fed import console
from gym_fed.errors import ErrorCode, GymError

if TYPE_CHECKING:
    from gym_fed.evaluation.delta_error import LayerError


def print_errors(name: str, bits_per_weight: float, errors: list[LayerError]) -> None:
    """A row a tensor: codec, bits a weight, relative errors."""
    from rich import box

    from gym_fed.tables import TextTable

    table = TextTable(
        title=f"{name}: {bits_per_weight:.3f} bits a weight, header included; relative errors of weights and outputs",
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
    )
    table.add_column("tensor", overflow="fold")
    table.add_column("codec")
    for column in ("bits", "weights", "outputs"):
        table.add_column(column, justify="right")
    for e in errors:
        output = "-" if e.output_error is None else _percent(e.output_error)
        table.add_row(
            e.name, e.codec or "left out", f"{e.bits_per_weight:.2f}", _percent(e.weight_error), output
        )
    console.out.print(table)


def _percent(value: float) -> str:
    return "unchanged" if math.isnan(value) else f"{100 * value:.1f}%"


def require_matplotlib() -> None:
    """Refuse ``--plot`` before any work where there is nothing to draw with.

    Raises:
        GymError: ``MISSING_DEPENDENCY``.
    """
    if find_spec("matplotlib") is None:
        raise GymError(
            ErrorCode.MISSING_DEPENDENCY, "--plot: matplotlib is not installed", "pip install 'gym-fed[plot]'"
        )


def draw_errors(path: Path, found: dict[str, list[LayerError]]) -> None:
    """Errors of every tensor, a marker a file; the format is that of the path's suffix."""
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
    console.err.print(f"wrote {path}")
