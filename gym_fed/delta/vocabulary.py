"""Encode and apply the vocabulary of a fine-tune that has more tokens, or a larger padded vocabulary, than its base.

The tensors of the base are encoded without the rows of added tokens. Those rows are written as exact values
(``gym_fed.delta.added_tokens``), together with the tokens' ids, texts and properties.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from gym_fed.base.modeling.vocabulary import (
    TokenChanges,
    extended_tokenizer,
    set_special_ids,
    text_tokenizer,
    token_changes,
    vocabulary_difference,
    vocabulary_parameters,
)
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.core.text import counted, plain
from gym_fed.delta.added_tokens import (
    MAX_ADDED_TOKENS,
    AddedToken,
    AddedTokens,
    rows_name,
    shown_tokens,
    unnamed_rows,
)
from gym_fed.delta.base import BaseSpec, Tensors, model_tensors
from gym_fed.delta.file import DeltaFile, apply_delta
from gym_fed.delta.writer import DeltaEntry, DeltaInfo, write_delta

if TYPE_CHECKING:
    from torch import Tensor, nn

    from gym_fed.base.models import LoadedModel


@dataclass(frozen=True)
class VocabularyChange:
    """The additions of a fine-tune to its base's vocabulary.

    Attributes:
        tokens: The added tokens.
        first: Index of the first of ``rows``: that of the first added token, or else the base's number of rows.
        rows: The rows from there to the end of the vocabulary, by parameter; empty if the base's rows suffice.
    """

    tokens: AddedTokens = field(default_factory=AddedTokens)
    first: int = 0
    rows: Mapping[str, Tensor] = field(default_factory=dict)

    def __bool__(self) -> bool:
        """True if anything was added."""
        return bool(self.tokens or self.rows)

    def __str__(self) -> str:
        """Describe it as text; empty if nothing was added."""
        words = []
        if self.tokens.tokens:
            texts = shown_tokens(token.text for token in self.tokens.tokens)
            words.append(f"{counted(len(self.tokens.tokens), 'added token')} ({texts})")
        if self.rows:
            size = self.first + len(next(iter(self.rows.values())))
            padding = unnamed_rows(self.first, size, (token.id for token in self.tokens.tokens))
            words.append(f"rows {self.first} to {size - 1} of {', '.join(sorted(self.rows))}")
            words.extend([f"rows {padding} have no token"] if padding else [])
        return "; ".join(words)


def split_vocabulary(
    tuned: nn.Module, base: Tensors, tokenizers: tuple[Any, Any] = (None, None), name: str = "the fine-tune"
) -> tuple[dict[str, Tensor], VocabularyChange]:
    """Split a fine-tune into tensors with the base's shapes and the change of its vocabulary.

    A vocabulary that was cut to the tokenizer's size (the base's is padded) gets the base's missing rows back.

    Args:
        tuned: The fine-tune; its unchanged tensors are returned as they are.
        base: Tensors of the base.
        tokenizers: Tokenizers of the base and the fine-tune, if both are known.
        name: Name of the fine-tune in errors.

    Raises:
        GymError: ``BASE_MISMATCH`` for tokens that cannot be added to the base's tokenizer, or have no rows.
    """
    tokens = _added_tokens(*tokenizers, name)
    split = model_tensors(tuned)
    keys = [key for key in vocabulary_parameters(tuned) if key in base]
    old_sizes, new_sizes = {len(base[key]) for key in keys}, {len(split[key]) for key in keys}
    if len(old_sizes) != 1 or any(split[key].shape[1:] != base[key].shape[1:] for key in keys):
        return split, VocabularyChange(tokens)  # another model, which the comparison of shapes reports
    (old,), (new,) = old_sizes, new_sizes
    _require_rows(tokens, new, name)
    if new < old:
        _require_unnamed(tokenizers[0], new, name)
    first = min([old, *(token.id for token in tokens.tokens)])
    rows: dict[str, Tensor] = {}
    for key in keys if new != old or first < old else ():
        whole, before = split[key], base[key].to(split[key])
        split[key] = torch.cat([whole[: min(first, new)], before[min(first, new) :]])
        rows[key] = torch.cat([whole[first:], before[max(first, new) :]]).detach().to("cpu", torch.float32)
    if new <= old and first == old:
        rows = {}
    for key, values in rows.items():
        _require_finite(values, first, key, tokens)
    return split, VocabularyChange(tokens, first, rows)


def attach_vocabulary(
    path: str | Path, spec: BaseSpec, change: VocabularyChange, out: str | Path | None = None
) -> DeltaInfo:
    """Write a delta with added tokens and their rows to ``out``, by default to ``path``, and remove ``path``."""
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
        os.replace(scratch, file if out is None else out)
    finally:
        scratch.unlink(missing_ok=True)
        if out is not None:
            file.unlink(missing_ok=True)
    return info


def tuned_tokenizer(tokenizer: Any, delta: DeltaFile) -> Any:
    """Return the base's tokenizer (or processor) with the tokens that a delta adds; itself if it adds none.

    Raises:
        GymError: ``BASE_MISMATCH`` if the tokens do not follow the base's tokens, or have no rows.
    """
    return extended_by(tokenizer, delta.vocabulary, str(delta.path)) if delta.vocabulary else tokenizer


def apply_with_tokens(
    loaded: LoadedModel, path: str | Path, spec: BaseSpec, scale: float = 1.0
) -> LoadedModel:
    """Apply a delta to a base in place, with its added tokens; return it with the tokenizer of the fine-tune.

    Raises:
        GymError: Errors of ``DeltaFile.open`` and ``tuned_tokenizer``.
    """
    with DeltaFile.open(path, spec, added_tokens=True) as delta:
        tokenizer = tuned_tokenizer(loaded.tokenizer, delta)
        apply_delta(loaded.model, delta, scale)
        set_special_ids(loaded.model, tokenizer, delta.vocabulary.roles)
    return replace(loaded, tokenizer=tokenizer)


def adds_tokens(path: str | Path) -> bool:
    """Return True if a delta has a larger vocabulary than its base, which only ``apply_with_tokens`` can use."""
    with DeltaFile.open(path, added_tokens=True) as delta:
        return bool(delta.vocabulary) or delta.added_rows is not None


def extended_by(tokenizer: Any, tokens: AddedTokens, name: str) -> Any:
    """Return a copy of a tokenizer (or processor) with added tokens; raises the errors of ``extended_tokenizer``."""
    parts = (tokens.tokens, tokens.changed)
    added, changed = (tuple((t.id, t.text, t.flags) for t in part) for part in parts)
    return extended_tokenizer(tokenizer, TokenChanges(added, changed, tokens.roles), name)


def _added_tokens(base: Any, tuned: Any, name: str) -> AddedTokens:
    """Return the tokens that only the fine-tune's tokenizer has, if they can be added to the base's."""
    if base is None or tuned is None:
        return AddedTokens()
    difference = vocabulary_difference(base, tuned)
    if difference.changed or not difference.added:
        return AddedTokens()
    if len(difference.added) > MAX_ADDED_TOKENS:
        raise GymError(
            ErrorCode.BASE_MISMATCH,
            f"{name}: adds {counted(len(difference.added), 'token')}, over the limit of {MAX_ADDED_TOKENS}",
            "export the whole model: gym export --format huggingface",
        )
    changes = token_changes(base, tuned, name)
    extended_tokenizer(base, changes, name)
    parts = (changes.tokens, changes.changed)
    tokens, changed = (tuple(AddedToken(*token) for token in part) for part in parts)
    try:
        return AddedTokens.parse(AddedTokens(tokens, changes.roles, changed).to_value())  # as readers do
    except GymError as error:
        raise GymError(ErrorCode.BASE_MISMATCH, f"{name}: {error.message}", "shorten or remove it") from error


def _require_finite(values: Tensor, first: int, key: str, tokens: AddedTokens) -> None:
    """Refuse rows with NaN or infinity before anything is written."""
    finite = torch.isfinite(values.reshape(len(values), -1)).all(dim=1)
    if bool(finite.all()):
        return
    number = first + int((~finite).nonzero()[0])
    text = next((f" ({plain(token.text, 40)!r})" for token in tokens.tokens if token.id == number), "")
    raise GymError(
        ErrorCode.DELTA_INVALID,
        f"row {number}{text} of {key} is not finite",
        "training diverged: lower the learning rate",
    )


def _require_rows(tokens: AddedTokens, rows: int, name: str) -> None:
    for token in tokens.tokens[-1:]:
        if token.id >= rows:
            raise GymError(
                ErrorCode.BASE_MISMATCH,
                f"{name}: its tokenizer has the token {plain(token.text, 40)!r} with the id {token.id}, but its "
                f"embeddings have {counted(rows, 'row')}",
                "use the model that was trained with this tokenizer (model.resize_token_embeddings)",
            )


def _require_unnamed(tokenizer: Any, size: int, name: str) -> None:
    """Refuse embeddings that were cut below the base's tokens, or whose base's tokenizer is unknown."""
    rows = f"{name}: its embeddings have {counted(size, 'row')}, "
    if tokenizer is None:
        raise GymError(
            ErrorCode.BASE_MISMATCH,
            f"{rows}fewer than its base's, but the base's tokenizer is unknown",
            "pass the base and the fine-tune by name, so that their tokenizers are read",
        )
    largest = max(text_tokenizer(tokenizer).get_vocab().values(), default=-1)
    if largest >= size:
        raise GymError(
            ErrorCode.BASE_MISMATCH,
            f"{rows}but its base has tokens up to the id {largest}",
            "a delta cannot remove tokens; use a fine-tune with all of them",
        )


def _exact_dtype(values: Tensor) -> str:
    """Return ``bfloat16`` if it holds the values exactly, otherwise ``float32``."""
    return "bfloat16" if torch.equal(values.to(torch.bfloat16).to(values.dtype), values) else "float32"
