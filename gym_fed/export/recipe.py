"""Recipe folders, which name the commands to run elsewhere: a page beside the files, and scripts."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

PAGE = "RECIPE.md"


def write_recipe(folder: Path, page: str, scripts: Mapping[str, str]) -> None:
    """Write the page and the scripts, by their names, into a folder that is there."""
    for name, text in {PAGE: page, **scripts}.items():
        (folder / name).write_text(text, encoding="utf-8")
