"""The table of planned recipes in docs/recipes-for-models.md is what tools/plans.py says."""

from __future__ import annotations

import pytest

from gym_fed.config.recipes import get_recipe
from tools.plans import BEGIN, END, PAGE, public_recipes, row


@pytest.mark.parametrize("name", ["smollm2-full", "smollm2-lora"])
def test_the_line_of_a_recipe_is_that_of_the_tool(name: str) -> None:
    written = PAGE.read_text(encoding="utf-8").split(BEGIN)[1].split(END)[0]
    planned, left = row(get_recipe(name))
    assert left == []
    assert [line for line in written.splitlines(keepends=True) if f"`{name}`" in line] == [planned]


def test_every_recipe_for_a_public_model_is_in_the_table_or_left_out_by_the_name_of_its_model() -> None:
    written = PAGE.read_text(encoding="utf-8").split(BEGIN)[1].split(END)[0]
    for recipe in public_recipes():
        assert f"`{recipe.name}`" in written or any(model in written for model in recipe_models(recipe.name))


def recipe_models(name: str) -> list[str]:
    from gym_fed.config.recipes import sizes_for

    return [size["model"] for size in sizes_for(get_recipe(name).file).values()]
