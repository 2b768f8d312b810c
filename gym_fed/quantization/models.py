"""What a quantiser is given: models by name or as modules, and which of their tensors is what."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from torch import nn

from gym_fed.models import load_model, model_name

Model: TypeAlias = "nn.Module | str"
"""A causal LM, or what ``gym_fed.models.load_model`` loads: ``gym-nano``, a folder, a name in the local cache."""

Kind = Literal["matrix", "embedding", "small"]


@dataclass(frozen=True)
class Given:
    """A model, with its tokenizer where it was loaded by name, and its name."""

    model: Any
    tokenizer: Any
    name: str


def resolve_model(model: Model) -> Given:
    """Load a model given by name; a LoRA adapter is merged into its base.

    Raises:
        GymError: ``MODEL_NOT_FOUND`` or ``MODEL_INVALID``.
    """
    if isinstance(model, str):
        loaded = load_model(model)
        found: Any = loaded.model
        if hasattr(found, "peft_config"):
            found = found.merge_and_unload()
        return Given(found, loaded.tokenizer, model_name(model))
    path = str(getattr(getattr(model, "config", None), "name_or_path", "") or "")
    return Given(model, None, model_name(path) if path else type(model).__name__)


def kinds_of(model: Any) -> dict[str, Kind]:
    """What each parameter is: ``embedding`` for input embeddings and head, tied ones once; ``small`` for all else
    that is one-dimensional."""
    ends = [model.get_input_embeddings(), model.get_output_embeddings()]
    weights = {id(module.weight) for module in ends if module is not None}
    found: dict[str, Kind] = {}
    for name, parameter in model.named_parameters():
        if id(parameter) in weights:
            found[name] = "embedding"
        else:
            found[name] = "small" if parameter.ndim < 2 else "matrix"
    return found


def linear_aliases(model: Any) -> dict[str, str]:
    """``<module>.weight`` of each linear layer to the name of its parameter, which differs for a tied head."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    return {
        f"{path}.weight": names[id(module.weight)]
        for path, module in model.named_modules()
        if isinstance(module, nn.Linear) and id(module.weight) in names
    }
