"""Which format is meant: by ``--format``, by the name of the file, or by a word of another platform."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from gym_fed.core.aliases import member, note
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.core.registries import EXPORT_FORMATS
from gym_fed.export.formats.base import ExportFormat, Options

FOLDER = "huggingface"
"""What a name without a known suffix is."""
_OF_FILES = frozenset(
    f".{name}"
    for name in (
        *(
            "bin",
            "ckpt",
            "engine",
            "ggml",
            "gguf",
            "gymdelta",
            "h5",
            "mlmodel",
            "mlpackage",
            "nemo",
            "onnx",
            "plan",
        ),
        *("pt", "pt2", "pte", "pth", "safetensors", "tar", "tflite", "xml", "zip"),
    )
)
"""Suffixes of files in which models come; a folder is not called so by intention."""
_IN_A_FOLDER = {
    ".engine": "tensorrt_llm", ".plan": "tensorrt_llm",
    ".mlmodel": "coreml", ".mlpackage": "coreml",
    ".xml": "openvino",
}  # fmt: skip
"""Formats that are folders, by a file that they hold or make."""


def settled(format: str | None, path: Path | None, options: Options) -> tuple[ExportFormat, Options]:
    """The format, and the options in its own words, before anything is loaded.

    Args:
        format: A member of ``EXPORT_FORMATS``, or its name elsewhere; None: by the suffix of ``path``.
        path: Where it is to be written; None is not looked at.
        options: As they were given.

    Raises:
        GymError: ``USAGE`` for what is unknown, or for a suffix that contradicts the format; ``MISSING_DEPENDENCY``.
    """
    if format is None:
        chosen = format_named(format_by_suffix(path) if path is not None else FOLDER)
    else:
        chosen = format_named(format)
    if path is not None:
        chosen = chosen.at(path)
        _require_suffix(chosen, path)
    options = replace(options, quantization=_quantization(chosen, options.quantization))
    _require_quantization(chosen, options.quantization)
    chosen.require_options(options)
    return chosen, options


def format_named(name: str) -> ExportFormat:
    """The format, before anything is loaded.

    Raises:
        GymError: ``USAGE`` for one that is not there.
    """
    plain = name.lower().replace("-", "_")
    found = next(
        (known for known in (name, plain, member("export format", plain)) if known in EXPORT_FORMATS), None
    )
    if found is None:
        _refuse_for_formats_with(plain, f"{name} is no format, but a quantization of")
        there = ", ".join(EXPORT_FORMATS.names())
        raise GymError(ErrorCode.USAGE, f"format {name} is unknown", f"there are {there}: gym export --list")
    if found not in (name, plain):
        note(f"format {name}", f"`--format {found}`")
    chosen: ExportFormat = EXPORT_FORMATS.new(found)
    return chosen


def format_by_suffix(path: Path) -> str:
    """The format whose files end as ``path`` does, of several the first by name; ``huggingface`` for any other name.

    Formats of other packages come after all of ours, and those that cannot be used are left out with a warning.
    """
    return next(
        (name for name, known in _usable().items() if known.suffix and path.suffix.lower() == known.suffix),
        FOLDER,
    )


def _usable() -> dict[str, type[ExportFormat]]:
    """Every format that can be used, by name, ours first."""
    own = EXPORT_FORMATS.own()
    names = sorted(EXPORT_FORMATS.usable(), key=lambda name: name not in own)
    return {name: EXPORT_FORMATS.type_of(name) for name in names}


def _require_suffix(chosen: ExportFormat, path: Path) -> None:
    """Refuse a name that says another format than the one that is written.

    Raises:
        GymError: ``USAGE``.
    """
    suffix = path.suffix.lower()
    if suffix not in _OF_FILES or suffix == chosen.suffix:
        return
    kind = f"a file that ends in {chosen.suffix}" if chosen.is_file and chosen.suffix else "a folder"
    other = format_by_suffix(path)
    if chosen.name == FOLDER and suffix in _IN_A_FOLDER:
        raise GymError(
            ErrorCode.USAGE,
            f"{path} ends in {path.suffix}, and that file comes with a folder",
            f"-o {path.with_suffix('')} --format {_IN_A_FOLDER[suffix]}",
        )
    remedy = f"-o {path.with_suffix(chosen.suffix if chosen.is_file else '')}"
    raise GymError(
        ErrorCode.USAGE,
        f"{path} ends in {path.suffix}, and format {chosen.name} is {kind}",
        f"{remedy}, or --format {other}" if other not in (FOLDER, chosen.name) else remedy,
    )


def _quantization(chosen: ExportFormat, name: str) -> str:
    """The format's own word; one that is unknown stays, to be refused by name."""
    for known in (name, name.lower().replace("-", "_")):
        if not known or known in chosen.quantizations:
            return known
    found = member(f"quantization of {chosen.name}", name.lower())
    if found is None or (found and found not in chosen.quantizations):
        return name
    note(
        f"quantization {name}",
        f"`--quantization {found}`" if found else f"what format {chosen.name} is without it",
    )
    return found


def _require_quantization(chosen: ExportFormat, name: str) -> None:
    """Refuse a quantization of another format.

    Raises:
        GymError: ``USAGE`` naming the formats that have it; those that have none like it are left to the format.
    """
    if not name or name in chosen.quantizations:
        return
    plain = name.lower().replace("-", "_")
    _refuse_for_formats_with(plain, f"format {chosen.name} has no quantization {name}: it is of")


def _refuse_for_formats_with(quantization: str, what: str) -> None:
    """Refuse where formats have this quantization; ``what`` reads on with their names.

    Raises:
        GymError: ``USAGE`` naming the formats, with the options of the first.
    """
    formats = [name for name, known in _usable().items() if quantization in known.quantizations]
    if formats:
        raise GymError(
            ErrorCode.USAGE,
            f"{what} {' and '.join(formats)}",
            f"--format {formats[0]} --quantization {quantization}",
        )
