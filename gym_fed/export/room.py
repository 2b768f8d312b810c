"""Refuses an export that disk or memory will not do for, with the numbers, before a model is loaded."""

from __future__ import annotations

import shutil
from pathlib import Path

from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.core.text import readable_bytes
from gym_fed.export.formats.base import ExportFormat, Options
from gym_fed.export.needs import LIBRARIES_BYTES, ExportNeeds, Weights


def require_room(
    chosen: ExportFormat, weights: Weights, path: Path, options: Options, *, check: bool, loaded: bool = False
) -> ExportNeeds:
    """Refuse an export for which disk or memory will not do.

    Args:
        chosen: The format.
        weights: Of the whole model.
        path: Where it is to be written.
        options: How.
        check: Whether it is read back.
        loaded: Whether the model is in memory already.

    Raises:
        GymError: ``DISK_FULL``; ``TOO_LARGE`` for too little memory.
    """
    from gym_fed.doctor.checks.devices import available_memory_bytes

    needs = chosen.needs(weights, options)
    folder = next(place for place in path.absolute().parents if place.is_dir())
    free = shutil.disk_usage(folder).free
    if needs.disk > free:
        raise GymError(
            ErrorCode.DISK_FULL,
            f"format {chosen.name} takes about {readable_bytes(needs.disk)} of disk, and {folder} has "
            f"{readable_bytes(free)}",
            "free some space there, write to another disk, or choose a smaller format or quantization",
        )
    there = available_memory_bytes()
    # The process that reads back has its libraries loaded while this one still writes.
    whole = max(needs.writing + LIBRARIES_BYTES, needs.reading) if check else needs.writing
    memory = whole - (weights.full_bytes if loaded else 0)
    if memory <= there:
        return needs
    remedy = "use a machine with more memory, or close other programs"
    if check and needs.writing <= there:
        remedy += f"; --skip-check takes {readable_bytes(needs.writing)}"
    raise GymError(
        ErrorCode.TOO_LARGE,
        f"format {chosen.name} takes about {readable_bytes(memory)} of memory, and {readable_bytes(there)} are free",
        remedy,
    )
