"""Sizes and machines of the recipes for public models: `gym configs copy qwen3-lora --size 4B --on cuda`.

Both tables are YAML files next to the recipes (``configs/models/presets``). A value replaces that of its key in the
recipe's text, so that comments stay; a key that the recipe lacks is added at the end.
"""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from gym_fed.core.errors import ErrorCode, GymError


def sizes_for(file: Path) -> dict[str, dict[str, Any]]:
    """Return the sizes of a recipe by name: those of its model's family. Other recipes have none."""
    model = yaml.safe_load(file.read_text(encoding="utf-8")).get("model")
    for sizes in _table(file, "sizes").values():
        if any(size["model"] == model for size in sizes.values()):
            return dict(sizes)
    return {}


def fitted(file: Path, *, size: str | None, machine: str | None) -> str:
    """Return a recipe's text for a size of its family and a kind of machine; None leaves either unchanged.

    Raises:
        GymError: ``USAGE`` for a size or machine that there is not, or that the recipe cannot use.
    """
    text = file.read_text(encoding="utf-8")
    if size is not None:
        text = _sized(text, file, size)
    if machine is not None:
        text = _placed(text, file, machine)
    return text


def _sized(text: str, file: Path, size: str) -> str:
    sizes = sizes_for(file)
    size_name = next((name for name in sizes if name.lower() == size.lower()), None)
    if size_name is None:
        raise GymError(
            ErrorCode.USAGE,
            f"--size {size}: {file.stem} has no such size",
            f"one of {', '.join(sizes)}" if sizes else "its model has one size; leave --size out",
        )
    chosen = sizes[size_name]
    text = _with(text, "model", chosen["model"], chosen["licence"])
    recipe = yaml.safe_load(text)
    changes = chosen.get(recipe.get("finetuning", "full"), {}) if recipe["algorithm"] == "sft" else {}
    for key, value in changes.items():
        text = _with(text, key, value, f"for {size_name}: see presets/sizes.yaml of the recipes")
    return text


def _placed(text: str, file: Path, machine: str) -> str:
    machines = _table(file, "machines")
    if machine not in machines:
        raise GymError(
            ErrorCode.USAGE, f"--on {machine}: no such kind of machine", f"one of {', '.join(machines)}"
        )
    recipe = yaml.safe_load(text)
    if machine == "mps" and "quantization" in recipe:
        raise GymError(
            ErrorCode.USAGE,
            f"--on mps: {file.stem} holds its base in 4 bits, which bitsandbytes does on CUDA and CPU alone",
            "copy the recipe of LoRA instead",
        )
    values = dict(machines[machine])
    rows = values.pop("per_device_train_batch_size", None)
    if rows is not None:
        values |= _smaller_batches(recipe, rows)
    for key, value in values.items():
        text = _with(text, key, value, f"on {machine}")
    return text


def _smaller_batches(recipe: dict[str, Any], rows: int) -> dict[str, Any]:
    """Lower the batch and keep the rows per step, and whole groups of answers where prompts are answered."""
    group = (recipe.get(recipe.get("algorithm", "sft")) or {}).get("num_generations", 1)
    before = recipe["per_device_train_batch_size"]
    at_once = min(rows * group, before)
    steps = before * recipe.get("gradient_accumulation_steps", 1) // at_once
    return {"per_device_train_batch_size": at_once, "gradient_accumulation_steps": steps}


def _with(text: str, key: str, value: Any, why: str) -> str:
    """Replace ``key: value`` at the top level, and its comment by ``why``."""
    shown = yaml.safe_dump({key: value}).strip()
    line = re.compile(rf"^{re.escape(key)}:.*$", re.MULTILINE)
    new = f"{shown} # {why}"
    if line.search(text):
        return line.sub(lambda _: new, text, count=1)
    return f"{text.rstrip()}\n{new}\n"


def _table(file: Path, name: str) -> dict[str, Any]:
    return _parsed(file.parent / "presets" / f"{name}.yaml")


@cache
def _parsed(table: Path) -> dict[str, Any]:
    """Parse the sizes once for all recipes."""
    return yaml.safe_load(table.read_text(encoding="utf-8")) if table.is_file() else {}
