"""Compare the vocabularies of a base and its fine-tune, and extend a base's tokenizer, embeddings and head."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.core.text import counted, plain

FLAGS = ("lstrip", "normalized", "rstrip", "single_word", "special")
"""The properties of a ``tokenizers.AddedToken``."""
ROLES = ("bos_token", "eos_token", "pad_token", "unk_token")


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


Token = tuple[int, str, tuple[str, ...]]
"""Id, text, and the true ones of ``FLAGS``, sorted."""


@dataclass(frozen=True)
class TokenChanges:
    """The additions that turn a base's tokenizer into that of its fine-tune.

    Attributes:
        tokens: Tokens that the base lacks, in order of ids.
        changed: Tokens of the base with other properties, in order of ids.
        roles: Text of each special token (of ``ROLES``) that differs.
    """

    tokens: tuple[Token, ...] = ()
    changed: tuple[Token, ...] = ()
    roles: Mapping[str, str] = field(default_factory=dict)


def token_changes(base: Any, tuned: Any, name: str) -> TokenChanges:
    """Compare two tokenizers whose shared tokens have the same ids.

    Raises:
        GymError: ``BASE_MISMATCH`` for new tokens that text is merged into, which cannot be added.
    """
    added = vocabulary_difference(base, tuned).added
    old, new = text_tokenizer(base), text_tokenizer(tuned)
    known, before = new.added_tokens_decoder, old.added_tokens_decoder
    if learned := [text for number, text in added.items() if number not in known]:
        raise GymError(
            ErrorCode.BASE_MISMATCH,
            f"{name}: its tokenizer model was retrained: it merges text into "
            f"{counted(len(learned), 'new token')}, such as {plain(learned[0], 40)!r}",
            "add tokens with tokenizer.add_tokens, or export the whole model",
        )

    def listed(numbers: Iterable[int]) -> tuple[Token, ...]:
        return tuple(
            (n, str(known[n].content), tuple(flag for flag in FLAGS if getattr(known[n], flag)))
            for n in sorted(numbers)
        )

    changed = {n for n, token in known.items() if n not in added and token != before.get(n)}
    roles = {
        role: str(text)
        for role in ROLES
        if (text := getattr(new, role, None)) is not None and str(text) != str(getattr(old, role, None))
    }
    return TokenChanges(listed(added), listed(changed), roles)


def extended_tokenizer(base: Any, changes: TokenChanges, name: str) -> Any:
    """Return a copy of a tokenizer (or processor) with additional tokens.

    Args:
        base: The tokenizer to extend.
        changes: The tokens to add or to change.
        name: Name of the fine-tune in errors.

    Raises:
        GymError: ``BASE_MISMATCH`` naming the first token that would get another id.
    """
    from tokenizers import AddedToken

    extended = copy.deepcopy(base)
    wider = text_tokenizer(extended)
    ids = wider.get_vocab()
    for number, text, _ in changes.changed:
        if ids.get(text) != number:
            raise GymError(
                ErrorCode.BASE_MISMATCH,
                f"{name}: changes the token {plain(text, 40)!r} with id {number}, but its id in the base is "
                f"{ids.get(text)}",
                "use the tokenizer that the base was published with",
            )
    tokens = sorted((*changes.changed, *changes.tokens))
    # One call for all, since each one compiles all added tokens; the flag makes a token special.
    wider.add_tokens(
        [AddedToken(text, **{flag: flag in flags for flag in FLAGS}) for _, text, flags in tokens]
    )
    ids = wider.get_vocab()
    for number, text, _ in tokens:
        if (actual := ids.get(text)) != number:
            raise GymError(
                ErrorCode.BASE_MISMATCH,
                f"{name}: its token {plain(text, 40)!r} has the id {number}, but added to the base's tokenizer "
                f"it gets {actual}",
                "use the tokenizer that the base was published with, and ids that follow it without gaps",
            )
    for role, text in changes.roles.items():
        if text not in ids:
            raise GymError(
                ErrorCode.BASE_MISMATCH,
                f"{name}: its {role} {plain(text, 40)!r} is not a token of the extended tokenizer",
                "use the tokenizer that the base was published with",
            )
        setattr(wider, role, text)
    return extended


def set_special_ids(model: Any, tokenizer: Any, roles: Iterable[str]) -> None:
    """Set the ids of special tokens in a model's configs, so that generation ends at the tokenizer's end token."""
    wider = text_tokenizer(tokenizer)
    configs = (model.config, model.config.get_text_config(), getattr(model, "generation_config", None))
    for role in roles:
        for config in configs:
            if config is not None and hasattr(config, f"{role}_id"):
                setattr(config, f"{role}_id", wider.convert_tokens_to_ids(getattr(wider, role)))


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
            f"{file}: has rows of added tokens for {', '.join(sorted(given))}, but this model's vocabulary is in "
            f"{', '.join(sorted(own)) or 'no module of transformers'}",
            "use the base that the delta was made from",
        )


def set_last_rows(model: Any, size: int, rows: Mapping[str, Any]) -> None:
    """Extend the vocabulary of a transformers model to ``size`` rows, and set the last of them to ``rows``."""
    import torch

    grow(model, size)
    parameters = vocabulary_parameters(model)
    with torch.no_grad():
        for name, values in rows.items():
            parameters[name][size - len(values) :] = values.to(parameters[name].device)


def grow(model: Any, size: int) -> None:
    """Extend the vocabulary of a transformers model to ``size`` rows of zeros."""
    import torch

    rows = len(model.get_input_embeddings().weight)
    if size > rows:
        model.resize_token_embeddings(size, mean_resizing=False)
        with torch.no_grad():
            for parameter in vocabulary_parameters(model).values():
                parameter[rows:] = 0.0


def fit_rows(model: Any, name: str, weights: Path) -> None:
    """Extend a base's vocabulary to the embedding rows that an adapter's file has, for PEFT to load them into.

    Raises:
        GymError: ``MODEL_INVALID`` if only some of the matrices have additional rows.
    """
    from safetensors import SafetensorError, safe_open

    parameters = vocabulary_parameters(model)
    try:
        with safe_open(weights, framework="pt") as file:
            sizes = {
                own: shape[0]
                for key in file.keys()  # noqa: SIM118 (it is no dict)
                if (own := key.removeprefix("base_model.model.").replace(".base_layer.", ".")) in parameters
                if (shape := file.get_slice(key).get_shape())
            }
    except SafetensorError:
        return  # loading reports it
    largest = max(sizes.values(), default=0)
    if not parameters or largest <= len(next(iter(parameters.values()))):
        return
    if missing := [key for key in parameters if sizes.get(key) != largest]:
        raise GymError(
            ErrorCode.MODEL_INVALID,
            f"{name}: has {counted(largest, 'embedding row')}, more than its base, but no such rows of "
            f"{', '.join(missing)}",
            "save the adapter with save_embedding_layers=True",
        )
    grow(model, largest)
