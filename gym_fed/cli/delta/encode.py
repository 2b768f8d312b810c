"""`gym delta encode`: encode a fine-tune with any codec, and print or plot the errors of its layers."""

from __future__ import annotations

import itertools
import math
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from gym_quant.registry import CODECS

from gym_fed.cli.options import (
    BaseArgument,
    DeltaFileOption,
    OverwriteOption,
    PlotOption,
    TunedArgument,
    require_new_file,
)
from gym_fed.core import console
from gym_fed.core.console import AsJson, MemberName
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.core.help import AllowDifferences
from gym_fed.core.text import counted

if TYPE_CHECKING:
    from gym_fed.evaluation.merge_statistics import LayerError
    from gym_fed.quantization.config import CalibratedPolicy
    from gym_fed.quantization.report import QuantReport


_RENAMED = {
    "method": "--codec",
    "norms": "--set small_tensors",
    "per_channel": "--set group_size=tensor or group_size=row",
    "bits": "--codec",
}


def encode(
    base: BaseArgument,
    tuned: TunedArgument,
    output: DeltaFileOption,
    codec: Annotated[
        str,
        typer.Option(
            "--codec",
            click_type=MemberName(CODECS, ("compact", "auto"), checked=False),
            help="compact (keeps 99% of each tensor), bitdelta (one bit), auto (fits a budget), or another codec.",
        ),
    ] = "compact",
    group_size: Annotated[
        str | None, typer.Option(metavar="SIZE", help="Columns per scale; or row, tensor, auto.")
    ] = None,
    rank: Annotated[
        int | None, typer.Option(help="Rank for lora; a LoRA run's own factors are kept.")
    ] = None,
    small: Annotated[
        str | None,
        typer.Option(
            metavar="CODEC",
            help="Codec of the norms and other small tensors.",
            click_type=MemberName(CODECS, checked=False),
        ),
    ] = None,
    data: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Text to distil scales, weight errors by layer inputs, and measure the gain.",
        ),
    ] = None,
    settings: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="KEY=VALUE",
            help="Set a key of the codec or its calibration, such as max_error=0.05; repeatable.",
        ),
    ] = None,
    aligned: Annotated[
        str | None,
        typer.Option(metavar="MODEL", help="Instruction-tuned model for safety_threshold; BASE by default."),
    ] = None,
    unaligned: Annotated[
        str | None, typer.Option(metavar="MODEL", help="Model before its alignment, for safety_threshold.")
    ] = None,
    plot: PlotOption = None,
    allow_differences: AllowDifferences = False,
    overwrite: OverwriteOption = False,
    json_: AsJson = False,
) -> None:
    """Encode TUNED minus BASE, calibrated and distilled on your own text, and show each layer's error."""
    from gym_fed.data.reading import load_rows
    from gym_fed.quantization.quantizer import Quantizer

    require_new_file(output, overwrite)
    if plot is not None:
        require_matplotlib()
    words = {"codec": codec, "group_size": _number(group_size), "lora_rank": rank, "small_tensors": small}
    given = {key: value for key, value in words.items() if value is not None}
    policy = _policy(given, settings or [], has_text=data is not None)
    report = Quantizer(policy).quantize(
        base,
        tuned,
        out=output,
        calibration=load_rows(data) if data else None,
        aligned=aligned,
        unaligned=unaligned,
        allow_differences=allow_differences,
        progress=not json_,
    )
    if json_:
        console.print_json(report.to_dict())
    else:
        _show(report, policy.codec)
    if plot is not None:
        draw_errors(plot, {output.name: _errors(report)})


def _number(group_size: str | None) -> int | str | None:
    return int(group_size) if group_size and group_size.isdecimal() else group_size


def _policy(values: dict[str, Any], settings: list[str], *, has_text: bool) -> CalibratedPolicy:
    """Build the encoding policy from options and settings; with text, uncalibrated scales are distilled."""
    from gym_fed.config.yaml.file import parse_overrides, validate
    from gym_fed.quantization.config import BitDeltaConfig, CalibratedPolicy

    for path, value in parse_overrides(settings):
        name = ".".join(map(str, path))
        if len(path) != 1:
            raise GymError(ErrorCode.USAGE, f"--set {name}: settings are not nested", "pass KEY=VALUE")
        if name in _RENAMED:
            raise GymError(
                ErrorCode.CONFIG_INVALID,
                f"--set {name}: renamed to {_RENAMED[name]}",
                "see docs/quantization.md",
            )
        values[name] = value
    if not has_text:
        values = {"distill_steps": 0, "calibration_samples": 0} | values
    elif values["codec"] in CODECS and "distill_steps" not in values:
        member = CODECS.type_of(values["codec"])
        if member.has_scales and not member.weighs_inputs:
            values["distill_steps"] = BitDeltaConfig.model_fields["distill_steps"].default
    return validate(values, CalibratedPolicy, "options")


def _errors(report: QuantReport) -> list[Any]:
    from gym_fed.evaluation.merge_statistics import LayerError

    return [
        LayerError(
            t.name,
            t.codec,
            t.bits_per_weight,
            math.nan if t.codec is None and not t.energy else t.error,
            t.output_error,
        )
        for t in report.tensors
    ]


def _show(report: QuantReport, codec: str) -> None:
    print_errors(str(report.path), report.bits_per_weight, _errors(report))
    if report.distillation is not None:
        distillation = report.distillation
        console.out.print(
            f"distilled {counted(distillation.num_scales, 'scale')} in {counted(distillation.steps, 'step')}, "
            f"{distillation.seconds:.1f} s: {distillation.loss} {distillation.loss_before:.4f} -> "
            f"{distillation.loss_after:.4f}"
        )
    else:
        console.out.print("not distilled: no --data, or distill_steps=0")
    console.out.print(f"safety projection: {report.safety}")
    for layer in report.layers:
        if layer.replaced:
            console.out.print(f"  projected {layer.name}: cosine {layer.cosine}")
    if report.vocabulary:
        console.out.print(f"vocabulary: {report.vocabulary}", markup=False)
    if report.not_in_file:
        console.out.print(f"not in the file: {'; '.join(report.not_in_file)}", markup=False)
    if report.kept is not None:
        console.out.print(f"keeps {report.kept:.2%} of the delta{_remedy(report.kept, codec)}")
    if (gain := report.gain) is not None:
        share = "no gain to keep" if gain.kept is None else f"keeps {gain.kept:.1%} of the gain"
        losses = f"loss {gain.base:.4f} -> {gain.encoded:.4f}, fine-tune {gain.tuned:.4f}"
        console.out.print(f"{share} on --data: {losses}")
    console.out.print(f"{counted(report.size_bytes, 'byte')}, sha256 {report.sha256}")


def _remedy(kept: float, codec: str) -> str:
    """Return a hint on how to keep more of the delta or write a smaller file; empty if there is none."""
    from gym_fed.delta.kept import MIN_KEPT

    if codec == "compact" and kept < MIN_KEPT:
        return "; a smaller max_error keeps more"
    if kept < MIN_KEPT:
        return "; --codec compact keeps 99%, in a larger file"
    return "; --codec bitdelta writes one bit per weight and keeps less" if codec == "compact" else ""


def print_errors(name: str, bits_per_weight: float, errors: list[LayerError]) -> None:
    """Print a row per tensor: codec, bits per weight, relative errors."""
    from rich import box

    from gym_fed.core.console import TextTable

    table = TextTable(
        title=f"{name}: {bits_per_weight:.3f} bits per weight, header included; relative errors of weights and outputs",
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
    console.print_table(table)


def _percent(value: float) -> str:
    return "unchanged" if math.isnan(value) else f"{100 * value:.1f}%"


def require_matplotlib() -> None:
    """Refuse ``--plot`` before any work if matplotlib is not installed.

    Raises:
        GymError: ``MISSING_DEPENDENCY``.
    """
    if find_spec("matplotlib") is None:
        raise GymError(
            ErrorCode.MISSING_DEPENDENCY, "--plot: matplotlib is not installed", "pip install 'gym-fed[plot]'"
        )


def draw_errors(path: Path, errors_by_file: dict[str, list[LayerError]]) -> None:
    """Plot the errors of every tensor, with one marker per file; the path's suffix determines the format."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    names = [e.name for e in next(iter(errors_by_file.values()))]
    figure, axes = pyplot.subplots(figsize=(8, 1 + 0.22 * len(names)), layout="constrained")
    for marker, (name, errors) in zip(itertools.cycle("osv^D*"), errors_by_file.items(), strict=False):
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
