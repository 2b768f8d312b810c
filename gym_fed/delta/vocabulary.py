"""Encode and apply the vocabulary of a fine-tune that has more tokens, or a larger padded vocabulary, than its base.

The tensors of the base are encoded as ever, without the additional rows. Those are written as values, exactly
(``gym_fed.delta.added_tokens``), together with the tokens' ids, texts and properties.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from gym_fed.base.modeling.vocabulary import extended_tokenizer, text_tokenizer, vocabulary_difference
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.core.text import counted, plain
from gym_fed.delta.added_tokens import (
    FLAGS,
    MAX_ADDED_TOKENS,
    ROLES,
    AddedToken,
    AddedTokens,
    rows_name,
    shown_tokens,
    unnamed_rows,
)
from gym_fed.delta.base import BaseSpec, Tensors
from gym_fed.delta.file import DeltaFile
from gym_fed.delta.policy import parts_of
from gym_fed.delta.writer import DeltaEntry, DeltaInfo, write_delta

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class VocabularyChange:
    """What a fine-tune added to its base's vocabulary.

    Attributes:
        tokens: The added tokens.
        first: The number of rows of the base; 0 if there are no additional rows.
        rows: The rows beyond them, by parameter.
    """

    tokens: AddedTokens = field(default_factory=AddedTokens)
    first: int = 0
    rows: Mapping[str, Tensor] = field(default_factory=dict)

    def __bool__(self) -> bool:
        """True if anything was added."""
        return bool(self.tokens or self.rows)

    def __str__(self) -> str:
        """Describe it in words; empty if nothing was added."""
        words = []
        if self.tokens.tokens:
            texts = shown_tokens(token.text for token in self.tokens.tokens)
            words.append(f"{counted(len(self.tokens.tokens), 'added token')} ({texts})")
        if self.rows:
            size = self.first + len(next(iter(self.rows.values())))
            padding = unnamed_rows(self.first, size, (token.id for token in self.tokens.tokens))
            words.append(f"rows {self.first} to {size - 1} of {', '.join(sorted(self.rows))}")
            words.extend([f"no token has the rows {padding}"] if padding else [])
        return "; ".join(words)


def split_vocabulary(
    tuned: Tensors, base: Tensors, tokenizers: tuple[Any, Any] = (None, None), name: str = "the fine-tune"
) -> tuple[dict[str, Tensor], VocabularyChange]:
    """Split a fine-tune's tensors into those of the base's shapes, and the change of its vocabulary.

    A vocabulary that was cut to the tokenizer's size (the base's is padded) gets the base's rows again.

    Args:
        tuned: Tensors of the fine-tune; unchanged ones are returned as they are.
        base: Tensors of the base.
        tokenizers: Tokenizers of the base and the fine-tune, if both are known.
        name: Name of the fine-tune in errors.

    Raises:
        GymError: ``BASE_MISMATCH`` for tokens that cannot be added to the base's tokenizer, or have no rows.
    """
    tokens = _added_tokens(*tokenizers, name)
    sizes = {
        (len(base[key]), len(tensor))
        for key, tensor in tuned.items()
        if key in base and tensor.shape != base[key].shape
        if tensor.ndim and tensor.shape[1:] == base[key].shape[1:]
    }
    different = [key for key in tuned if key in base and tuned[key].shape != base[key].shape]
    parts = parts_of({key: tuple(tensor.shape) for key, tensor in base.items()})
    if len(sizes) != 1 or not any(parts[key] == "embeddings" for key in different):
        _require_rows(tokens, _embedding_rows(base, parts), name)
        return dict(tuned), VocabularyChange(tokens)
    ((old, new),) = sizes
    if any(tuple(tuned[key].shape) != (new, *base[key].shape[1:]) for key in different):
        return dict(tuned), VocabularyChange(tokens)  # another model, which the comparison of shapes reports
    _require_rows(tokens, new, name)
    split = dict(tuned)
    for key in different:
        split[key] = (
            tuned[key][:old] if new > old else torch.cat([tuned[key], base[key][new:].to(tuned[key])])
        )
    if new < old:
        _require_unnamed(tokenizers[0], new, name)
        return split, VocabularyChange(tokens)
    rows = {key: tuned[key][old:].detach().to("cpu", torch.float32) for key in different}
    return split, VocabularyChange(tokens, old, rows)


def attach_vocabulary(path: str | Path, spec: BaseSpec, change: VocabularyChange) -> DeltaInfo:
    """Rewrite a delta with added tokens and their rows.

    Raises:
        GymError: ``DELTA_INVALID`` for rows that are not finite.
    """
    file = Path(path)
    scratch = file.with_name(f".{file.name}.rows")
    entries = [
        DeltaEntry.of(rows_name(name, change.first), values, "dense", dtype=_exact_dtype(values))
        for name, values in change.rows.items()
    ]
    try:
        with DeltaFile.open(file, spec) as delta:
            for record in delta.manifest.tensors:
                payload = functools.partial(delta.payload, record.name)
                entries.append(DeltaEntry(record.name, record.shape, record.codec, record.params, payload))
            info = write_delta(scratch, entries, spec, delta.manifest.extra, change.tokens)
        os.replace(scratch, file)
    finally:
        scratch.unlink(missing_ok=True)
    return info


def tuned_tokenizer(tokenizer: Any, delta: DeltaFile) -> Any:
    """Return the base's tokenizer (or processor) with the tokens that a delta adds; itself if it adds none.

    Raises:
        GymError: ``BASE_MISMATCH`` if they do not follow on the base's tokens, or have no rows.
    """
    tokens = delta.vocabulary
    if not tokens:
        return tokenizer
    return _extended(tokenizer, tokens, str(delta.path))


def _extended(tokenizer: Any, tokens: AddedTokens, name: str) -> Any:
    listed = ((t.id, t.text, {flag: flag in t.flags for flag in FLAGS}) for t in tokens.tokens)
    return extended_tokenizer(tokenizer, listed, tokens.roles, name)


def _added_tokens(base: Any, tuned: Any, name: str) -> AddedTokens:
    """Return the tokens that only the fine-tune's tokenizer has, if they can be added to the base's."""
    if base is None or tuned is None:
        return AddedTokens()
    difference = vocabulary_difference(base, tuned)
    if difference.changed or not difference.added:
        return AddedTokens()
    old, new = text_tokenizer(base), text_tokenizer(tuned)
    if len(difference.added) > MAX_ADDED_TOKENS:
        raise GymError(
            ErrorCode.BASE_MISMATCH,
            f"{name}: adds {counted(len(difference.added), 'token')}, over the limit of {MAX_ADDED_TOKENS}",
            "export the whole model: gym export --format huggingface",
        )
    known = new.added_tokens_decoder
    tokens = [
        AddedToken(number, text, tuple(flag for flag in FLAGS if getattr(known.get(number), flag, False)))
        for number, text in difference.added.items()
    ]
    roles = {
        role: str(text)
        for role in ROLES
        if (text := getattr(new, role, None)) is not None and str(text) != str(getattr(old, role, None))
    }
    added = AddedTokens.parse(AddedTokens(tuple(tokens), roles).to_value())  # the limits that readers check
    _extended(base, added, name)
    return added


def _embedding_rows(base: Tensors, parts: Mapping[str, str]) -> int:
    return max((len(base[key]) for key, part in parts.items() if part == "embeddings"), default=0)


def _require_rows(tokens: AddedTokens, rows: int, name: str) -> None:
    for token in tokens.tokens[-1:]:
        if rows and token.id >= rows:
            raise GymError(
                ErrorCode.BASE_MISMATCH,
                f"{name}: its tokenizer has the token {plain(token.text, 40)!r} with the id {token.id}, and its "
                f"embeddings have {counted(rows, 'row')}",
                "give the model that was trained with this tokenizer (model.resize_token_embeddings)",
            )


def _require_unnamed(tokenizer: Any, size: int, name: str) -> None:
    """Refuse embeddings that were cut below the base's tokens."""
    largest = -1 if tokenizer is None else max(text_tokenizer(tokenizer).get_vocab().values(), default=-1)
    if largest >= size:
        raise GymError(
            ErrorCode.BASE_MISMATCH,
            f"{name}: its embeddings have {counted(size, 'row')}, and its base has tokens up to the id {largest}",
            "a delta cannot remove tokens; give a fine-tune with all of them",
        )


def _exact_dtype(values: Tensor) -> str:
    """Return ``bfloat16`` if it holds the values exactly, otherwise ``float32``."""
    return "bfloat16" if torch.equal(values.to(torch.bfloat16).to(values.dtype), values) else "float32"
