"""The list of export formats: what each writes, what reads it back, and what it needs."""

from __future__ import annotations

import sys
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from gym_fed.core.errors import GymError
from gym_fed.core.registries import EXPORT_FORMATS

if TYPE_CHECKING:
    from gym_fed.export.formats.base import ExportFormat


def formats() -> list[dict[str, Any]]:
    """List every format, with what it writes, what reads it back, and what is missing for it."""
    return [_row(name) for name in EXPORT_FORMATS.names()]


def _row(name: str) -> dict[str, Any]:
    try:
        chosen: type[ExportFormat] = EXPORT_FORMATS.type_of(name)
    except GymError as error:
        why = f"cannot be used: {error.message}"
        return {
            "format": name, "writes": why, "quantizations": [], "read_by": "", "suffix": "", "needs": [], "missing": [],
        }  # fmt: skip
    there = ", which reads the folder; what it is for is not run here" if chosen.unchecked else ""
    text = (sys.modules[chosen.__module__].__doc__ or "").split("\n\n")[0]
    return {
        "format": name,
        "writes": " ".join(text.replace("`", "").split()),
        "quantizations": list(chosen.quantizations),
        "read_by": f"{chosen.reader}{there}",
        "suffix": chosen.suffix,
        "needs": [module.replace("_", "-") for module in chosen.requires],
        "missing": [module.replace("_", "-") for module in chosen.requires if find_spec(module) is None],
    }
