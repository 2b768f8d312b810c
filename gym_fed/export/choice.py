"""List the export formats, and choose one by ``--format``, a file's suffix, or its name in another tool."""

from __future__ import annotations

import sys
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from gym_fed.core.aliases import member, note
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.core.registries import EXPORT_FORMATS
from gym_fed.export.formats.base import ExportFormat, Options

FOLDER = "huggingface"
"""The default format for a path without a known suffix."""
_FILE_SUFFIXES = (
    ".bin .ckpt .engine .ggml .gguf .gymdelta .h5 .mlmodel .mlpackage .nemo .onnx .plan .pt .pt2 .pte .pth "
    ".safetensors .tar .tflite .xml .zip"
)
"""Suffixes of model files; an output folder with such a name is a mistake."""
_IN_A_FOLDER = {
    ".engine": "tensorrt_llm", ".plan": "tensorrt_llm",
    ".mlmodel": "coreml", ".mlpackage": "coreml",
    ".xml": "openvino",
}  # fmt: skip
"""Formats that are folders, by the suffix of a file that they contain or are converted to."""


def formats() -> list[dict[str, Any]]:
    """List every format with its output, the library that reads it back, and missing packages."""
    return [_row(name) for name in EXPORT_FORMATS.names()]


def _row(name: str) -> dict[str, Any]:
    try:
        chosen: type[ExportFormat] = EXPORT_FORMATS.type_of(name)
    except GymError as error:
        why = f"cannot be used: {error.message}"
        return {
            "format": name, "writes": why, "quantizations": [], "read_by": "", "suffix": "", "needs": [], "missing": [],
        }  # fmt: skip
    reads = ", which reads the folder; the target program is not run" if chosen.unchecked else ""
    text = (sys.modules[chosen.__module__].__doc__ or "").split("\n\n")[0]
    return {
        "format": name,
        "writes": " ".join(text.replace("`", "").split()),
        "quantizations": list(chosen.quantizations),
        "read_by": f"{chosen.reader}{reads}",
        "suffix": chosen.suffix,
        "needs": [module.replace("_", "-") for module in chosen.requires],
        "missing": [module.replace("_", "-") for module in chosen.requires if find_spec(module) is None],
    }


def resolve_format(format: str | None, path: Path | None, options: Options) -> tuple[ExportFormat, Options]:
    """Resolve the format, and translate the options to its own names, before anything is loaded.

    Args:
        format: A member of ``EXPORT_FORMATS``, or its name in other tools; None: by the suffix of ``path``.
        path: The path to write to; None is not checked.
        options: The user's options.

    Raises:
        GymError: ``USAGE`` for unknown values, or a suffix that contradicts the format; ``MISSING_DEPENDENCY``.
    """
    if format is None:
        format = FOLDER if path is None else format_by_suffix(path)
    chosen = format_named(format)
    if path is not None:
        chosen = chosen.at(path)
        _require_suffix(chosen, path)
    options = replace(options, quantization=_quantization(chosen, options.quantization))
    _require_quantization(chosen, options.quantization)
    chosen.require_options(options)
    return chosen, options


def format_named(name: str) -> ExportFormat:
    """Return a format by name, before anything is loaded.

    Raises:
        GymError: ``USAGE`` for an unknown name.
    """
    plain = name.lower().replace("-", "_")
    candidates = (name, plain, member("export format", plain))
    alternative = next((known for known in candidates if known in EXPORT_FORMATS), None)
    if alternative is None:
        _refuse_for_formats_with(plain, f"{name} is not a format, but a quantization of format")
        remedy = f"choose one of {', '.join(EXPORT_FORMATS.names())}; see gym export --list"
        raise GymError(ErrorCode.USAGE, f"format {name} is unknown", remedy)
    if alternative not in (name, plain):
        note(f"format {name}", f"`--format {alternative}`")
    chosen: ExportFormat = EXPORT_FORMATS.new(alternative)
    return chosen


def format_by_suffix(path: Path) -> str:
    """Return the first format with the suffix of ``path``; ``huggingface`` if there is none.

    Formats from other packages come after the built-in ones; unusable formats are skipped with a warning.
    """
    return next(
        (name for name, known in _usable().items() if known.suffix and path.suffix.lower() == known.suffix),
        FOLDER,
    )


def _usable() -> dict[str, type[ExportFormat]]:
    """Return all usable formats by name, the built-in ones first."""
    built_in = EXPORT_FORMATS.own()
    names = sorted(EXPORT_FORMATS.usable(), key=lambda name: name not in built_in)
    return {name: EXPORT_FORMATS.type_of(name) for name in names}


def _require_suffix(chosen: ExportFormat, path: Path) -> None:
    """Refuse a path whose suffix belongs to another format.

    Raises:
        GymError: ``USAGE``.
    """
    suffix = path.suffix.lower()
    if suffix not in _FILE_SUFFIXES.split() or suffix == chosen.suffix:
        return
    kind = f"a file that ends in {chosen.suffix}" if chosen.is_file and chosen.suffix else "a folder"
    other = format_by_suffix(path)
    if chosen.name == FOLDER and suffix in _IN_A_FOLDER:
        raise GymError(
            ErrorCode.USAGE,
            f"{path} ends in {path.suffix}, but such files are written into a folder",
            f"-o {path.with_suffix('')} --format {_IN_A_FOLDER[suffix]}",
        )
    remedy = f"-o {path.with_suffix(chosen.suffix if chosen.is_file else '')}"
    raise GymError(
        ErrorCode.USAGE,
        f"{path} ends in {path.suffix}, but format {chosen.name} is {kind}",
        f"{remedy}, or --format {other}" if other not in (FOLDER, chosen.name) else remedy,
    )


def _quantization(chosen: ExportFormat, name: str) -> str:
    """Return the format's own name for a quantization; an unknown name is returned unchanged."""
    for known in (name, name.lower().replace("-", "_")):
        if not known or known in chosen.quantizations:
            return known
    own_name = member(f"quantization of {chosen.name}", name.lower())
    if own_name is None or (own_name and own_name not in chosen.quantizations):
        return name
    meaning = f"`--quantization {own_name}`" if own_name else f"format {chosen.name}'s default"
    note(f"quantization {name}", meaning)
    return own_name


def _require_quantization(chosen: ExportFormat, name: str) -> None:
    """Refuse a quantization that only other formats have.

    Raises:
        GymError: ``USAGE`` naming those formats; the chosen format itself refuses a name that no format has.
    """
    if not name or name in chosen.quantizations:
        return
    plain = name.lower().replace("-", "_")
    _refuse_for_formats_with(plain, f"format {chosen.name} has no quantization {name}, which is for")


def _refuse_for_formats_with(quantization: str, problem: str) -> None:
    """Refuse a quantization that other formats have; their names complete the sentence ``problem``.

    Raises:
        GymError: ``USAGE`` naming the formats, with the options of the first.
    """
    formats = [name for name, known in _usable().items() if quantization in known.quantizations]
    if formats:
        raise GymError(
            ErrorCode.USAGE,
            f"{problem} {' and '.join(formats)}",
            f"--format {formats[0]} --quantization {quantization}",
        )
