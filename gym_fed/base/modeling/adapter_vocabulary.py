"""The tokenizer and the embedding rows that an adapter brings along with its weights."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gym_fed.base.modeling.vocabulary import text_tokenizer, vocabulary_difference, vocabulary_parameters
from gym_fed.core.errors import ErrorCode, GymError

if TYPE_CHECKING:
    from gym_fed.base.modeling.adapters import Adapter

_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json")
_TEMPLATE = "chat_template.jinja"


def adapter_tokenizer(chain: Sequence[Adapter], tokenizer: Any, model: Any) -> Any:
    """Return the tokenizer (or processor) for a base with adapters.

    It is the base's, with the chat template of the last adapter that has one. If the last adapter's folder has a
    tokenizer with added tokens, and the model has rows for them, it is that one.

    Args:
        chain: Adapters in merging order.
        tokenizer: The base's; its chat template is changed in place.
        model: The model with the adapters.

    Raises:
        GymError: ``BASE_MISMATCH`` naming the first token with another id than in the base.
    """
    template = next((file for a in reversed(chain) if (file := a.folder / _TEMPLATE).is_file()), None)
    own = _own_tokenizer(chain[-1], tokenizer, model) if chain else None
    if own is not None:
        whole = copy.copy(tokenizer)
        if whole is text_tokenizer(whole):
            whole = own
        else:
            whole.tokenizer = own
        tokenizer = whole
    if template is not None:
        tokenizer.chat_template = template.read_text(encoding="utf-8")
    return tokenizer


def fit_rows(model: Any, weights: Path) -> None:
    """Extend a base's vocabulary to the embedding rows that an adapter's file has, for PEFT to load them into."""
    from safetensors import SafetensorError, safe_open

    parameters = vocabulary_parameters(model)
    try:
        with safe_open(weights, framework="pt") as file:
            sizes = [
                shape[0]
                for key in file.keys()  # noqa: SIM118 (it is no dict)
                if key.removeprefix("base_model.model.").replace(".base_layer.", ".") in parameters
                if (shape := file.get_slice(key).get_shape())
            ]
    except SafetensorError:
        return  # loading reports it
    largest = max(sizes, default=0)
    if parameters and largest > len(next(iter(parameters.values()))):
        model.resize_token_embeddings(largest, mean_resizing=False)


def _own_tokenizer(adapter: Adapter, base: Any, model: Any) -> Any:
    """Return an adapter's tokenizer if it extends the base's by tokens that have rows; None for the base's own."""
    from gym_fed.base.modeling.differences import tokenizer_difference
    from gym_fed.base.models import load_tokenizer

    if not any((adapter.folder / name).is_file() for name in _FILES):
        return None
    own = load_tokenizer(str(adapter.folder))
    if other := tokenizer_difference(base, own):
        raise GymError(
            ErrorCode.BASE_MISMATCH,
            f"{adapter.name}: its tokenizer is not its base's: {other}",
            "give the base that it was trained on, or restore the adapter's tokenizer",
        )
    added = vocabulary_difference(base, own).added
    rows = len(model.get_input_embeddings().weight)
    return own if added and max(added) < rows else None
