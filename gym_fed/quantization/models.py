"""What a quantiser is given: models by name or as modules."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeAlias

from torch import nn

from gym_fed.models import load_model, model_name

Model: TypeAlias = "nn.Module | str"
"""A causal LM, or what ``gym_fed.models.load_model`` loads: ``gym-nano``, a folder, a name in the local cache."""


@dataclass(frozen=True)
class Given:
    """A model, with its tokenizer where it was loaded by name, and its name."""

    model: Any
    tokenizer: Any
    name: str

    @property
    def is_adapter(self) -> bool:
        return hasattr(self.model, "peft_config")

    def whole(self) -> Any:
        """The model; an adapter is merged into its base, which it changes."""
        return self.model.merge_and_unload() if self.is_adapter else self.model


def resolve_model(model: Model) -> Given:
    """Load a model given by name.

    Raises:
        GymError: ``MODEL_NOT_FOUND`` or ``MODEL_INVALID``.
    """
    if isinstance(model, str):
        loaded = load_model(model)
        return Given(loaded.model, loaded.tokenizer, model_name(model))
    path = str(getattr(getattr(model, "config", None), "name_or_path", "") or "")
    return Given(model, None, model_name(path) if path else type(model).__name__)


def linear_aliases(model: Any) -> dict[str, str]:
    """``<module>.weight`` of each linear layer to the name of its parameter, which differs for a tied head."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    return {
        f"{path}.weight": names[id(module.weight)]
        for path, module in model.named_modules()
        if isinstance(module, nn.Linear) and id(module.weight) in names
    }
