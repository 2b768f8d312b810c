"""The tokenizer saved with an adapter."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from gym_fed.base.modeling.vocabulary import extended_tokenizer, token_changes, vocabulary_difference
from gym_fed.core.bounded.chat import MAX_TEMPLATE_CHARS
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.core.text import counted, plain

if TYPE_CHECKING:
    from gym_fed.base.modeling.adapters import Adapter

_log = logging.getLogger(__name__)
_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json")
_TEMPLATE = "chat_template.jinja"


def adapter_tokenizer(
    chain: Sequence[Adapter], tokenizer: Any, model: Any, load: Callable[[str], Any]
) -> Any:
    """Return the tokenizer (or processor) for a base with adapters.

    It is the base's, with the chat template of the last adapter that has one. If the last adapter's folder has a
    tokenizer with added tokens, and the model has rows for them, the tokens are added.

    Args:
        chain: Adapters in merging order.
        tokenizer: The base's; its chat template is changed in place.
        model: The model with the adapters.
        load: ``load_tokenizer``.

    Raises:
        GymError: ``BASE_MISMATCH`` naming the first token whose id differs from the base's; ``MODEL_INVALID`` for a
            chat template that is too long.
    """
    template = next((file for a in reversed(chain) if (file := a.folder / _TEMPLATE).is_file()), None)
    if chain:
        tokenizer = _extended(chain[-1], tokenizer, model, load)
    if template is not None:
        if template.stat().st_size > 4 * MAX_TEMPLATE_CHARS:
            raise GymError(
                ErrorCode.MODEL_INVALID,
                f"{template} has more than {MAX_TEMPLATE_CHARS:,} characters",
                "use another adapter",
            )
        tokenizer.chat_template = template.read_text(encoding="utf-8")
    return tokenizer


def _extended(adapter: Adapter, base: Any, model: Any, load: Callable[[str], Any]) -> Any:
    """Return the base's tokenizer with the tokens that an adapter's tokenizer adds, if the model has rows for them.

    Only tokens are taken from an adapter: its normalizer and merges could rewrite every prompt.
    """
    from gym_fed.base.modeling.differences import tokenizer_difference

    if not any((adapter.folder / name).is_file() for name in _FILES):
        return base
    own = load(str(adapter.folder))
    if other := tokenizer_difference(base, own):
        raise GymError(
            ErrorCode.BASE_MISMATCH,
            f"{adapter.name}: its tokenizer differs from its base's: {other}",
            "use the base that the adapter was trained on, or restore the adapter's tokenizer",
        )
    added = vocabulary_difference(base, own).added
    if not added:
        return base
    rows = len(model.get_input_embeddings().weight)
    if max(added) >= rows:
        token = next(token for number, token in added.items() if number >= rows)
        _log.warning(
            "%s: its tokenizer adds %s such as %r, but the embeddings have %d rows; using the base's tokenizer",
            adapter.name,
            counted(len(added), "token"),
            plain(token, 40),
            rows,
        )
        return base
    return extended_tokenizer(base, token_changes(base, own, adapter.name), adapter.name)
