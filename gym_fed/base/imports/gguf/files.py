"""Which files are GGUF models, and which of them belong together."""

from __future__ import annotations

import re
from pathlib import Path

from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.core.text import plain

SUFFIX = ".gguf"
_PART = re.compile(r"(.*)-([0-9]{5})-of-([0-9]{5})", re.DOTALL)
_SHOWN = 8


def is_gguf(path: Path) -> bool:
    """Whether a path is named as a GGUF file."""
    return path.suffix.lower() == SUFFIX


def only_gguf(folder: Path) -> Path | None:
    """The GGUF model of a folder without another one, by its first part; None where there is none.

    Raises:
        GymError: ``MODEL_INVALID`` where there are several.
    """
    found = sorted(file for file in folder.iterdir() if is_gguf(file) and file.is_file() and _is_first(file))
    if len(found) > 1:
        shown = ", ".join(plain(file.name, 80) for file in found[:_SHOWN])
        raise GymError(
            ErrorCode.MODEL_INVALID,
            f"{folder}: holds {len(found)} GGUF files: {shown}",
            f"name one of them: {folder / found[0].name}",
        )
    return found[0] if found else None


def parts_of(file: Path) -> list[Path]:
    """The files that a model is in: ``NAME-00001-of-00003.gguf`` and the others, or the one file.

    Raises:
        GymError: ``MODEL_INVALID`` naming a part that is missing.
    """
    found = _PART.fullmatch(file.stem)
    if found is None or not int(found[3]):
        return [file]
    stem, count = found[1], int(found[3])
    parts = [
        file.with_name(f"{stem}-{number:05}-of-{found[3]}{file.suffix}") for number in range(1, count + 1)
    ]
    for part in parts:
        if not part.is_file():
            raise GymError(
                ErrorCode.MODEL_INVALID, f"{part}: no such file", f"fetch all {count} parts of the model"
            )
    return parts


def _is_first(file: Path) -> bool:
    found = _PART.fullmatch(file.stem)
    return found is None or int(found[2]) == 1
