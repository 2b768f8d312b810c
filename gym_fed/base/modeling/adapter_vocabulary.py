"""Tokenizer and embedding rows saved with an adapter."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gym_fed.base.modeling.vocabulary import (
    extended_tokenizer,
    grow,
    token_changes,
    vocabulary_difference,
    vocabulary_parameters,
)
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.core.text import counted, plain

if TYPE_CHECKING:
    from gym_fed.base.modeling.adapters import Adapter

_log = logging.getLogger(__name__)
_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json")
_TEMPLATE = "chat_template.jinja"


def adapter_tokenizer(chain: Sequence[Adapter], tokenizer: Any, model: Any) -> Any:
    """Return the tokenizer (or processor) for a base with adapters.

    It is the base's, with the chat template of the last adapter that has one. If the last adapter's folder has a
    tokenizer with added tokens, and the model has rows for them, the tokens are added.

    Args:
        chain: Adapters in merging order.
        tokenizer: The base's; its chat template is changed in place.
        model: The model with the adapters.

    Raises:
        GymError: ``BASE_MISMATCH`` naming the first token with another id than in the base.
    """
    template = next((file for a in reversed(chain) if (file := a.folder / _TEMPLATE).is_file()), None)
    if chain:
        tokenizer = _extended(chain[-1], tokenizer, model)
    if template is not None:
        tokenizer.chat_template = template.read_text(encoding="utf-8")
    return tokenizer


def fit_rows(model: Any, adapter: Adapter, weights: Path) -> None:
    """Extend a base's vocabulary to the embedding rows that an adapter's file has, for PEFT to load them into.

    Raises:
        GymError: ``MODEL_INVALID`` if only some of the matrices have additional rows.
    """
    from safetensors import SafetensorError, safe_open

    parameters = vocabulary_parameters(model)
    try:
        with safe_open(weights, framework="pt") as file:
            sizes = {
                name: shape[0]
                for key in file.keys()  # noqa: SIM118 (it is no dict)
                if (name := key.removeprefix("base_model.model.").replace(".base_layer.", ".")) in parameters
                if (shape := file.get_slice(key).get_shape())
            }
    except SafetensorError:
        return  # loading reports it
    largest = max(sizes.values(), default=0)
    if not parameters or largest <= len(next(iter(parameters.values()))):
        return
    if missing := [name for name in parameters if sizes.get(name) != largest]:
        raise GymError(
            ErrorCode.MODEL_INVALID,
            f"{adapter.name}: has {counted(largest, 'embedding row')}, more than its base, but no such rows of "
            f"{', '.join(missing)}",
            "save the adapter with save_embedding_layers=True",
        )
    grow(model, largest)


def _extended(adapter: Adapter, base: Any, model: Any) -> Any:
    """Return the base's tokenizer with the tokens that an adapter's tokenizer adds, if the model has rows for them.

    Only tokens are taken from an adapter: its normalizer and merges could rewrite every prompt.
    """
    from gym_fed.base.modeling.differences import tokenizer_difference
    from gym_fed.base.models import load_tokenizer

    if not any((adapter.folder / name).is_file() for name in _FILES):
        return base
    own = load_tokenizer(str(adapter.folder))
    if other := tokenizer_difference(base, own):
        raise GymError(
            ErrorCode.BASE_MISMATCH,
            f"{adapter.name}: its tokenizer is not its base's: {other}",
            "use the base that the adapter was trained on, or restore the adapter's tokenizer",
        )
    added = vocabulary_difference(base, own).added
    if not added:
        return base
    rows = len(model.get_input_embeddings().weight)
    if max(added) >= rows:
        token = next(token for number, token in added.items() if number >= rows)
        _log.warning(
            "%s: its tokenizer adds %s such as %r, but the embeddings have %d rows: the base's tokenizer is used",
            adapter.name,
            counted(len(added), "token"),
            plain(token, 40),
            rows,
        )
        return base
    return extended_tokenizer(base, token_changes(base, own, adapter.name), adapter.name)
