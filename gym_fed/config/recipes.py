"""The recipes of the package: the checkout's ``configs/``, which a wheel carries as ``assets/configs``."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from gym_fed.config.recipe_presets import fitted, sizes_for
from gym_fed.core.errors import ErrorCode, GymError


@dataclass(frozen=True)
class Recipe:
    """A recipe file.

    Attributes:
        name: Without ``.yaml``.
        file: Its path.
        summary: Its first comment, as one line.
        sizes: Public models that it fits, by size; empty for others.
    """

    name: str
    file: Path
    summary: str
    sizes: tuple[str, ...] = ()


def recipes() -> list[Recipe]:
    """Return every recipe, by name.

    Raises:
        GymError: ``FILE_NOT_FOUND`` when the installation has none.
    """
    package = Path(__file__).parents[1]
    folders = (package / "assets" / "configs", package.parent / "configs")
    folder = next((f for f in folders if f.is_dir()), None)
    if folder is None:
        raise GymError(
            ErrorCode.FILE_NOT_FOUND,
            f"no recipes in {folders[0]}",
            "install gym-fed again; its wheel has them",
        )
    files = [*folder.glob("*.yaml"), *folder.glob("models/*.yaml")]
    return [
        Recipe(file.stem, file, _summary(file), tuple(sizes_for(file)))
        for file in sorted(files, key=lambda file: file.stem)
    ]


def get_recipe(name: str) -> Recipe:
    """Return the recipe with a name, with or without ``.yaml``.

    Raises:
        GymError: ``FILE_NOT_FOUND`` when there is none.
    """
    by_name = {recipe.name: recipe for recipe in recipes()}
    stem = name.removesuffix(".yaml")
    if stem not in by_name:
        raise GymError(
            ErrorCode.FILE_NOT_FOUND, f"no recipe is called {name!r}", f"one of {', '.join(by_name)}"
        )
    return by_name[stem]


def relocated(
    recipe: Recipe, target: Path, *, size: str | None = None, machine: str | None = None
) -> tuple[str, dict[Path, Path]]:
    """Return a recipe's text for another folder, and the data files to copy there.

    A recipe names its rows as ``configs/data/...``, which is right in the checkout only.

    Args:
        recipe: To be copied.
        target: The file that it becomes.
        size: One of ``recipe.sizes``.
        machine: ``cuda``, ``mps`` or ``cpu``.

    Returns:
        The text, and the new path (in ``data/`` next to ``target``) and the old path of each data file.
    """
    rows: dict[Path, Path] = {}

    def moved(match: re.Match[str]) -> str:
        place = target.parent / match.group(1)
        rows[place] = recipe.file.parent / match.group(1)
        return place.as_posix()

    text = re.sub(
        r"configs/(data/[\w./-]*[\w-])(?: *# from the root of the repository)?",
        moved,
        fitted(recipe.file, size=size, machine=machine),
    )
    return text, rows


def _summary(file: Path) -> str:
    """Return the first comment up to an empty line, the first command (an indented line) or its end."""
    words: list[str] = []
    for line in file.read_text(encoding="utf-8").splitlines():
        text = line.removeprefix("#")
        if not line.startswith("#") or not text.strip() or text.startswith("   "):
            break
        words.append(text.strip())
    return " ".join(words)
