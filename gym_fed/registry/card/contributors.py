"""The contributors of a global version, as ``gym-server model`` records them in the model's folder."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.core.json_files import read_object

FILE = "contributors.json"
MAX_SHOWN = 100
"""Most contributors that a card names."""


@dataclass(frozen=True)
class Contributor:
    """A contributor of a version.

    Attributes:
        contributor: The id.
        name: The name for publication; empty for contributors who are shown by id only.
        share: Its share of what the version's contributors get for its use, 0 to 1.
    """

    contributor: str
    name: str
    share: float


def contributors_in(folder: Path) -> list[Contributor]:
    """Read the contributors recorded in a model folder, the largest share first; empty if there are none.

    Raises:
        GymError: ``MODEL_INVALID`` for a file that cannot be read.
    """
    path = folder / FILE
    if not path.is_file():
        return []
    document = read_object(
        path, ErrorCode.MODEL_INVALID, "delete it, or write the version again: gym-server model"
    )
    lines = document.get("contributors")
    if not isinstance(lines, list) or not all(map(_is_line, lines)):
        raise GymError(
            ErrorCode.MODEL_INVALID,
            f"{path} does not list contributors with their shares",
            "delete it, or write the version again: gym-server model",
        )
    everybody = [
        Contributor(line["contributor"], line.get("name", ""), float(line["share"])) for line in lines
    ]
    return sorted(everybody, key=lambda line: -line.share)


def _is_line(line: Any) -> bool:
    if not isinstance(line, dict) or not isinstance(line.get("contributor"), str):
        return False
    share = line.get("share")
    if not isinstance(share, int | float) or isinstance(share, bool) or not math.isfinite(share):
        return False
    return isinstance(line.get("name", ""), str)
