"""The recipes of the package: ``configs/`` in a checkout, ``assets/configs`` in a wheel.

Two tables next to the recipes (``configs/models/presets``) list the sizes of public models and the kinds of machines,
for `gym configs copy qwen3-lora --size 4B --on cuda`. Values are replaced in the recipe's text to preserve comments; a
key that the recipe lacks is added at the end.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from gym_fed.core.errors import ErrorCode, GymError


@dataclass(frozen=True)
class Recipe:
    """A recipe file.

    Attributes:
        name: File name without ``.yaml``.
        file: Its path.
        summary: First comment, as one line.
        sizes: Public models that the recipe supports, by size; may be empty.
    """

    name: str
    file: Path
    summary: str
    sizes: tuple[str, ...] = ()


def recipes() -> list[Recipe]:
    """Return every recipe, by name.

    Raises:
        GymError: ``FILE_NOT_FOUND`` if the installation has none.
    """
    package = Path(__file__).parents[1]
    folders = (package / "assets" / "configs", package.parent / "configs")
    folder = next((f for f in folders if f.is_dir()), None)
    if folder is None:
        reason = f"no recipes in {folders[0]}"
        raise GymError(ErrorCode.FILE_NOT_FOUND, reason, "reinstall gym-fed; its wheel contains them")
    files = [*folder.glob("*.yaml"), *folder.glob("models/*.yaml")]
    return [
        Recipe(file.stem, file, _summary(file), tuple(sizes_for(file)))
        for file in sorted(files, key=lambda file: file.stem)
    ]


def get_recipe(name: str) -> Recipe:
    """Return the recipe of this name, which may end with ``.yaml``.

    Raises:
        GymError: ``FILE_NOT_FOUND`` if there is none.
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

    A recipe names its rows as ``configs/data/...``, which exists only in the checkout.

    Args:
        recipe: Recipe to copy.
        target: Path of the copy.
        size: Key of ``recipe.sizes``.
        machine: ``cuda``, ``mps`` or ``cpu``.

    Returns:
        Text, and new path (in ``data/`` next to ``target``) and old path of each data file.
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


def sizes_for(file: Path) -> dict[str, dict[str, Any]]:
    """Return the sizes of a recipe's model family by name; empty for other recipes."""
    model = yaml.safe_load(file.read_text(encoding="utf-8")).get("model")
    for sizes in _preset(file, "sizes").values():
        if any(size["model"] == model for size in sizes.values()):
            return dict(sizes)
    return {}


def fitted(file: Path, *, size: str | None, machine: str | None) -> str:
    """Return a recipe's text for a size of its family and a kind of machine; None leaves either unchanged.

    Raises:
        GymError: ``USAGE`` for a size or machine that is unknown or not supported by the recipe.
    """
    text = file.read_text(encoding="utf-8")
    if size is not None:
        text = _with_size(text, file, size)
    if machine is not None:
        text = _with_machine(text, file, machine)
    return text


def _with_size(text: str, file: Path, size: str) -> str:
    sizes = sizes_for(file)
    size_name = next((name for name in sizes if name.lower() == size.lower()), None)
    if size_name is None:
        reason = f"--size {size}: {file.stem} has no such size"
        remedy = f"one of {', '.join(sizes)}" if sizes else "its model has only one size; omit --size"
        raise GymError(ErrorCode.USAGE, reason, remedy)
    chosen = sizes[size_name]
    text = _set_key(text, "model", chosen["model"], chosen["licence"])
    recipe = yaml.safe_load(text)
    changes = chosen.get(recipe.get("finetuning", "full"), {}) if recipe["algorithm"] == "sft" else {}
    for key, value in changes.items():
        text = _set_key(text, key, value, f"for {size_name}: see presets/sizes.yaml of the recipes")
    return text


def _with_machine(text: str, file: Path, machine: str) -> str:
    machines = _preset(file, "machines")
    if machine not in machines:
        raise GymError(
            ErrorCode.USAGE, f"--on {machine}: unknown kind of machine", f"one of {', '.join(machines)}"
        )
    recipe = yaml.safe_load(text)
    if machine == "mps" and "quantization" in recipe:
        reason = f"--on mps: {file.stem} uses a 4-bit base, which bitsandbytes supports only on CUDA and CPU"
        raise GymError(ErrorCode.USAGE, reason, "copy the LoRA recipe instead")
    values = dict(machines[machine])
    rows = values.pop("per_device_train_batch_size", None)
    if rows is not None:
        values |= _smaller_batches(recipe, rows)
    for key, value in values.items():
        text = _set_key(text, key, value, f"on {machine}")
    return text


def _smaller_batches(recipe: dict[str, Any], rows: int) -> dict[str, Any]:
    """Lower the batch size while preserving rows per step and, for generated answers, complete groups."""
    group = (recipe.get(recipe.get("algorithm", "sft")) or {}).get("num_generations", 1)
    before = recipe["per_device_train_batch_size"]
    at_once = min(rows * group, before)
    steps = before * recipe.get("gradient_accumulation_steps", 1) // at_once
    return {"per_device_train_batch_size": at_once, "gradient_accumulation_steps": steps}


def _set_key(text: str, key: str, value: Any, why: str) -> str:
    """Replace ``key: value`` at the top level, with ``why`` as its comment."""
    shown = yaml.safe_dump({key: value}).strip()
    line = re.compile(rf"^{re.escape(key)}:.*$", re.MULTILINE)
    new = f"{shown} # {why}"
    if line.search(text):
        return line.sub(lambda _: new, text, count=1)
    return f"{text.rstrip()}\n{new}\n"


def _preset(file: Path, name: str) -> dict[str, Any]:
    return _load_preset(file.parent / "presets" / f"{name}.yaml")


@cache
def _load_preset(table: Path) -> dict[str, Any]:
    """Parse the sizes once for all recipes."""
    return yaml.safe_load(table.read_text(encoding="utf-8")) if table.is_file() else {}
