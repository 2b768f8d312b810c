"""Compare the vocabularies of a base and its fine-tune, and extend a base's tokenizer, embeddings and head."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.core.text import plain


@dataclass(frozen=True)
class VocabularyDifference:
    """The difference between two tokenizers.

    Attributes:
        added: Tokens that only the fine-tune has, by id.
        changed: Tokens of the base with another id in the fine-tune (None: absent there), by their id in the base.
    """

    added: dict[int, str]
    changed: dict[int, tuple[str, int | None]]


def vocabulary_difference(base: Any, tuned: Any) -> VocabularyDifference:
    """Compare token ids rather than files, since one tokenizer may be saved in several forms."""
    old, new = text_tokenizer(base).get_vocab(), text_tokenizer(tuned).get_vocab()
    added = {number: token for token, number in new.items() if token not in old}
    changed = {
        number: (token, new.get(token))
        for token, number in sorted(old.items(), key=lambda pair: pair[1])
        if new.get(token) != number
    }
    return VocabularyDifference(dict(sorted(added.items())), changed)


def text_tokenizer(tokenizer: Any) -> Any:
    """Return the tokenizer of a processor, and a tokenizer itself."""
    return getattr(tokenizer, "tokenizer", tokenizer)


def extended_tokenizer(
    base: Any, tokens: Iterable[tuple[int, str, Mapping[str, bool]]], roles: Mapping[str, str], name: str
) -> Any:
    """Return a copy of a tokenizer (or processor) with additional tokens.

    Args:
        base: The tokenizer to extend.
        tokens: Id, text and properties (``tokenizers.AddedToken``) of each token, in order of ids.
        roles: Text of special tokens, such as ``eos_token``.
        name: Name of the fine-tune in errors.

    Raises:
        GymError: ``BASE_MISMATCH`` naming the first token that would get another id.
    """
    from tokenizers import AddedToken

    whole = copy.deepcopy(base)
    wider = text_tokenizer(whole)
    for number, text, flags in tokens:
        wider.add_tokens([AddedToken(text, **flags)], special_tokens=bool(flags.get("special")))
        if (actual := wider.convert_tokens_to_ids(text)) != number:
            raise GymError(
                ErrorCode.BASE_MISMATCH,
                f"{name}: its token {plain(text, 40)!r} has the id {number}, and added to the base's tokenizer "
                f"it gets {actual}",
                "use the tokenizer that the base was published with, and ids that follow on it without gaps",
            )
    for role, text in roles.items():
        if wider.convert_tokens_to_ids(text) is None or text not in wider.get_vocab():
            raise GymError(
                ErrorCode.BASE_MISMATCH,
                f"{name}: its {role} {plain(text, 40)!r} is not a token of the extended tokenizer",
                "use the tokenizer that the base was published with",
            )
        setattr(wider, role, text)
    return whole


def vocabulary_parameters(model: Any) -> dict[str, Any]:
    """Return the parameters with a row for each token, by name: embeddings, head, and the head's bias."""
    inner = getattr(model, "get_input_embeddings", lambda: None)()
    if inner is None:
        return {}
    modules = [inner, model.get_output_embeddings()]
    own = {id(p) for module in modules if module is not None for p in module.parameters(recurse=False)}
    rows = len(inner.weight)
    return {name: p for name, p in model.named_parameters() if id(p) in own and len(p) == rows}


def require_vocabulary(model: Any, names: Iterable[str], file: str) -> None:
    """Check that rows for ``names`` extend exactly the vocabulary of a model.

    Raises:
        GymError: ``BASE_MISMATCH`` with the names of both.
    """
    own, given = set(vocabulary_parameters(model)), set(names)
    if own != given:
        raise GymError(
            ErrorCode.BASE_MISMATCH,
            f"{file}: has rows of added tokens for {', '.join(sorted(given))}, and the vocabulary of this model is in "
            f"{', '.join(sorted(own)) or 'no module of transformers'}",
            "use the base the delta was made from",
        )


def set_last_rows(model: Any, size: int, rows: Mapping[str, Any]) -> None:
    """Extend the vocabulary of a transformers model to ``size`` rows, and set the last of them to ``rows``."""
    import torch

    if size != len(model.get_input_embeddings().weight):
        model.resize_token_embeddings(size, mean_resizing=False)
    parameters = vocabulary_parameters(model)
    with torch.no_grad():
        for name, values in rows.items():
            parameters[name][size - len(values) :] = values.to(parameters[name].device)
