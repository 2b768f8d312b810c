"""Write the table of docs/recipes-for-models.md: planned memory and operations for public models.

Sizes come from `tools/plans.yaml`; a model that is not in it is named below the table. Nothing is measured.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import yaml

from gym_fed.config.recipes import Recipe, fitted, recipes, sizes_for
from gym_fed.config.train.training import TrainingConfig
from gym_fed.training.planning.memory import memory_of
from gym_fed.training.planning.plan import gib, step_operations
from gym_fed.training.planning.sizes import sizes_of

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "recipes-for-models.md"
BEGIN, END = "<!-- planned, by tools/plans.py -->\n", "<!-- until here -->\n"
HEAD = "| recipe | sizes | memory, GiB | operations a step |\n|---|---|---|---|\n"


def public_recipes() -> list[Recipe]:
    """Return the recipes for public models."""
    return [recipe for recipe in recipes() if recipe.sizes]


def row(recipe: Recipe) -> tuple[str, list[str]]:
    """Return a recipe's row of the table, planned for one GPU, and the models that are left out."""
    cells: list[tuple[str, str, str]] = []
    left = []
    known = yaml.safe_load((ROOT / "tools" / "plans.yaml").read_text(encoding="utf-8"))
    for size, preset in sizes_for(recipe.file).items():
        model = preset["model"]
        if model not in known:
            left.append(model)
            continue
        with tempfile.TemporaryDirectory() as folder:
            Path(folder, "config.json").write_text(json.dumps(known[model]), encoding="utf-8")
            values = yaml.safe_load(fitted(recipe.file, size=size, machine="cuda"))
            config = TrainingConfig(**{**values, "model": folder})
            sizes = sizes_of(config)
            peak = memory_of(config, sizes, device="cuda").peak
            cells.append((size, gib(peak).removesuffix(" GiB"), f"{step_operations(config, sizes):.1e}"))
    columns = [", ".join(column) for column in zip(*cells, strict=True)]
    return f"| `{recipe.name}` | {' | '.join(columns)} |\n" if cells else "", left


def table() -> str:
    """Return the table of all recipes, and the models that are not in it."""
    rows = [row(recipe) for recipe in public_recipes()]
    left = sorted({model for _, models in rows for model in models})
    lines = "".join(line for line, _ in rows)
    return f"{HEAD}{lines}\nNot planned, since their sizes are not stated here: {', '.join(left)}.\n"


def main() -> None:
    """Write the page."""
    before, rest = PAGE.read_text(encoding="utf-8").split(BEGIN)
    _, after = rest.split(END)
    PAGE.write_text(f"{before}{BEGIN}{table()}{END}{after}", encoding="utf-8")


if __name__ == "__main__":
    main()
