"""Handle differences between transformers' models: arguments, rope types, caches, and RWKV's weights."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor

_CACHES = ("past_key_values", "cache_params", "state")
"""The names of the cache among the arguments and outputs of models."""


def accepted(model: Any) -> frozenset[str]:
    """Return the argument names of a model's ``forward``, plus ``use_cache`` if it accepts any keyword argument."""
    parameters = inspect.signature(type(model).forward).parameters
    unnamed = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    return frozenset(parameters) | ({"use_cache"} if unnamed else set())


def first_ids(model: Any, tokens: int) -> Tensor:
    """Return the ids of a short text that are valid in every vocabulary."""
    device = next(model.parameters()).device
    ids: Tensor = (torch.arange(tokens, device=device) + 1) % model.get_input_embeddings().weight.shape[0]
    return ids


def body_of(model: Any) -> Any:
    """Return the part of a causal LM below its head, even if its ``base_model_prefix`` does not name it.

    In some classes that read images or audio (Llama 4), the head is inside of the language model.
    """
    if (body := model.base_model) is not model:
        return body
    if hasattr(model, "model"):
        return model.model
    return body_of(model.language_model) if hasattr(model, "language_model") else model


LONGROPE = "longrope"


def rope_types(model: Any) -> set[str]:
    """Return the rope types of a model's layers."""
    return {str(rope.get("rope_type")) for rope in _ropes(model)}


def longrope_turn(model: Any) -> int | None:
    """Return the length up to which longrope uses its short factors; None for other models."""
    if LONGROPE not in rope_types(model):
        return None
    name = "original_max_position_embeddings"
    stated = [
        getattr(model.config.get_text_config(), name, None),
        *(rope.get(name) for rope in _ropes(model)),
    ]
    return next((length for length in stated if isinstance(length, int)), None)


def _ropes(model: Any) -> list[dict[str, Any]]:
    rope = getattr(model.config.get_text_config(), "rope_parameters", None) or {}
    return [rope, *(value for value in rope.values() if isinstance(value, dict))]


def text_arguments(model: Any, ids: Tensor, start: int = 0) -> dict[str, Any]:
    """Return the arguments of a forward pass without a cache, for tokens that follow ``start`` others."""
    places = torch.arange(start, start + len(ids), device=ids.device)
    arguments = {"input_ids": ids[None], "position_ids": places[None], "use_cache": False}
    return {name: value for name, value in arguments.items() if name in accepted(model)}


class CacheArgument:
    """The argument and output through which a model accepts and returns its cache.

    Args:
        model: The model.
        used: Whether to use the cache.

    Attributes:
        name: The name of the argument; None without a cache.
    """

    @torch.inference_mode()
    def __init__(self, model: Any, *, used: bool = True) -> None:
        self._model, self._makes_none = model, False
        self.name = next((name for name in _CACHES if used and name in accepted(model)), None)
        if self.name is not None:
            output = model(**text_arguments(model, first_ids(model, 1)) | {"use_cache": True})
            self._makes_none = getattr(output, self.name, None) is None  # RecurrentGemma

    def arguments(self, cache: Any) -> dict[str, Any]:
        """Return the arguments for a cache; None is the cache of an empty text."""
        if self.name is None:
            return {"use_cache": False} if "use_cache" in accepted(self._model) else {}
        if cache is None and self._makes_none:
            from transformers import DynamicCache

            cache = DynamicCache(config=self._model.config)
        return {"use_cache": True, self.name: cache}

    def of(self, output: Any, arguments: dict[str, Any]) -> Any:
        """Return the cache after a forward pass with these arguments; None if the model has no cache."""
        if self.name is None:
            return None
        cache = getattr(output, self.name, None)
        return arguments.get(self.name) if cache is None else cache


def keep_weights(model: Any) -> int:
    """Disable RWKV's rescaling of its weights in inference, which only float16 needs, and undo earlier rescaling.

    Returns:
        The setting to restore; 0: none.
    """
    every = (
        getattr(model.config, "rescale_every", 0) if getattr(model.config, "model_type", "") == "rwkv" else 0
    )
    if every:
        body = model.base_model.train()
        body._rescale_layers()
        body.eval()
        model.config.rescale_every = 0
    return int(every)
