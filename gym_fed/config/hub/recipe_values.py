"""A recipe with its codec as single values, so that two of them can be compared key by key."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gym_fed.config.delta import CodecPolicy
    from gym_fed.config.hub.task import TrainingRecipe

SECTIONS = ("recipe", "codec")


def recipe_values(recipe: TrainingRecipe, codec: CodecPolicy) -> dict[str, Any]:
    """Return every value by its dotted key, such as ``recipe.lora.r``; lists are values."""
    values: dict[str, Any] = {}
    for section, model in zip(SECTIONS, (recipe, codec), strict=True):
        _put(section, model.model_dump(mode="json"), values)
    return values


def _put(key: str, value: Any, found: dict[str, Any]) -> None:
    if isinstance(value, dict) and value:
        for name, inner in value.items():
            _put(f"{key}.{name}", inner, found)
    else:
        found[key] = value
