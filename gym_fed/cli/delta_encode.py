"""`gym delta encode`: a fine-tune as a small file, by BitDelta or DeltaQuant."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from gym_fed import console
from gym_fed.cli.layer_errors import draw_errors, print_errors, require_matplotlib
from gym_fed.console import AsJson

if TYPE_CHECKING:
    from gym_fed.quantization.report import QuantReport

Method = Literal["bitdelta", "int8", "int4", "int2", "ternary", "binary"]


def encode(
    base: Annotated[str, typer.Argument(metavar="BASE", help="Model folder or name of the base.")],
    tuned: Annotated[
        str, typer.Argument(metavar="TUNED", help="Model folder of the fine-tune, or a LoRA run.")
    ],
    output: Annotated[Path, typer.Option("--output", "-o", help="The .gymdelta to write.")],
    method: Annotated[Method, typer.Option(help="Codec of matrices.")] = "bitdelta",
    data: Annotated[
        Path | None,
        typer.Option(help="Calibration text: distils scales, and weighs errors by the layers' inputs."),
    ] = None,
    settings: Annotated[
        list[str] | None,
        typer.Option(
            "--set", help="A setting of BitDeltaConfig or DeltaQuantConfig, such as group_size=row."
        ),
    ] = None,
    aligned: Annotated[
        str | None, typer.Option(help="safety_threshold: the safe, instruction-tuned model.")
    ] = None,
    unaligned: Annotated[
        str | None, typer.Option(help="safety_threshold: what that was aligned from.")
    ] = None,
    plot: Annotated[Path | None, typer.Option(help="Draw the errors into this file (png, svg, pdf).")] = None,
    force: Annotated[bool, typer.Option("--force", help="Overwrite the output.")] = False,
    json_: AsJson = False,
) -> None:
    """Encode TUNED minus BASE, calibrated and distilled on text of your own, and show what each layer lost."""
    from gym_fed.data.reading import load_rows
    from gym_fed.errors import ErrorCode, GymError

    if output.exists() and not force:
        raise GymError(ErrorCode.FILE_EXISTS, f"{output} exists", "choose another name, or pass --force")
    if plot is not None:
        require_matplotlib()
    quantizer = _quantizer(method, settings or [], has_text=data is not None)
    report = quantizer.quantize(
        base,
        tuned,
        out=output,
        calibration=load_rows(data) if data else None,
        aligned=aligned,
        unaligned=unaligned,
        progress=not json_,
    )
    console.tell(json_, report.to_dict(), lambda: _show(report))
    if plot is not None:
        draw_errors(plot, {output.name: _errors(report)})


def _quantizer(method: Method, settings: list[str], *, has_text: bool) -> Any:
    from gym_fed.config.yaml_file import parse_overrides, validate
    from gym_fed.errors import ErrorCode, GymError
    from gym_fed.quantization.bitdelta import BitDeltaQuantizer
    from gym_fed.quantization.config import BitDeltaConfig, DeltaQuantConfig, QuantMethod
    from gym_fed.quantization.deltaquant import DeltaQuantizer

    values: dict[str, Any] = {}
    for path, value in parse_overrides(settings):
        if len(path) != 1:
            name = ".".join(map(str, path))
            raise GymError(ErrorCode.USAGE, f"--set {name}: settings are not nested", "give KEY=VALUE")
        values[str(path[0])] = value
    if not has_text:
        values = {"distill_steps": 0, "calibration_samples": 0} | values
    if method == "bitdelta":
        return BitDeltaQuantizer(validate(values, BitDeltaConfig, "--set"))
    return DeltaQuantizer(validate({"method": QuantMethod(method), **values}, DeltaQuantConfig, "--set"))


def _errors(report: QuantReport) -> list[Any]:
    from gym_fed.evaluation.delta_error import LayerError

    return [LayerError(t.name, t.codec, t.bits_per_weight, t.error, t.output_error) for t in report.tensors]


def _show(report: QuantReport) -> None:
    print_errors(str(report.path), report.bits_per_weight, _errors(report))
    if report.distillation is not None:
        found = report.distillation
        console.out.print(
            f"distilled {found.num_scales:,} scales in {found.steps} steps, {found.seconds:.1f} s: "
            f"{found.loss} {found.loss_before:.4f} > {found.loss_after:.4f}"
        )
    else:
        console.out.print("not distilled: no --data, or distill_steps=0")
    console.out.print(f"safety projection: {report.safety}")
    for layer in report.layers:
        if layer.replaced:
            console.out.print(f"  projected {layer.name}: cosine {layer.cosine}")
    console.out.print(f"{report.size_bytes:,} bytes, sha256 {report.sha256}")
