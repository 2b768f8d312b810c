"""Merge deltas with different added tokens, by the text of the tokens.

The merged vocabulary is the base's, then the added tokens in order of first appearance, with new ids. Every update is
rewritten against a base that has all of them: the base's row of an added token is the coordinate-wise median of the
updates' rows for it, and an update without the token gets that row too. A token of only one update keeps its row, and
rows of shared tokens are merged by the rule, like any other weight. For one or two updates with a token this is
mergekit's ``tokenizer_source: union``; for more, mergekit takes the mean, which one hostile update can move anywhere.
Rows without an added token, from the first unused id on, are left out.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from gym_fed.base.modeling.vocabulary import (
    grow,
    require_vocabulary,
    text_tokenizer,
    vocabulary_parameters,
)
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.core.text import plain
from gym_fed.delta.added_tokens import AddedToken, AddedTokens, shown_tokens
from gym_fed.delta.base import BaseSpec
from gym_fed.delta.file import DeltaFile
from gym_fed.delta.vocabulary import VocabularyChange, extended_by
from gym_fed.delta.writer import DeltaEntry, write_delta

if TYPE_CHECKING:
    from torch import Tensor

    from gym_fed.base.models import LoadedModel


@dataclass(frozen=True)
class VocabularyUnion:
    """The union of the vocabularies of some updates.

    Attributes:
        tokens: All added tokens, with their ids in the union.
        spec: The original base.
        wider: The base with a row for every token, under the original's digest.
        old: The original base's rows by parameter.
        new: The wider base's rows by parameter.
        first: The id of the first added token.
    """

    tokens: AddedTokens
    spec: BaseSpec
    wider: BaseSpec
    old: dict[str, Tensor]
    new: dict[str, Tensor]
    first: int

    @classmethod
    def of(
        cls, updates: Sequence[DeltaFile], base: LoadedModel, spec: BaseSpec
    ) -> tuple[VocabularyUnion, LoadedModel] | None:
        """Return the union and the wider base; None if no update adds tokens. The base's model is changed in place.

        Raises:
            GymError: ``BASE_MISMATCH`` for a token that the base has, or a base without embeddings for all tokens.
        """
        if not any(update.vocabulary or update.added_rows for update in updates):
            return None
        model: Any = base.model
        ids = text_tokenizer(base.tokenizer).get_vocab()
        tokens = _union(updates, max(ids.values()) + 1)
        if taken := [token.text for token in tokens.tokens if token.text in ids]:
            raise GymError(
                ErrorCode.BASE_MISMATCH,
                f"the base's tokenizer has the tokens {shown_tokens(taken)}, which an update adds",
                "use the base that the updates were made from",
            )
        for update in updates:
            if update.added_rows is not None:
                require_vocabulary(model, update.added_rows.names, str(update.path))
        old = {name: p.detach().clone() for name, p in vocabulary_parameters(model).items()}
        num_rows = len(next(iter(old.values())))
        first = tokens.tokens[0].id if tokens.tokens else num_rows
        size = max(first + len(tokens.tokens), *(len(tensor) for tensor in old.values()))
        last = {name: _median_rows(updates, tokens, name, tensor) for name, tensor in old.items()}
        grow(model, size)
        parameters = vocabulary_parameters(model)
        with torch.no_grad():
            for name, rows in last.items():
                parameters[name][first : first + len(rows)] = rows.to(parameters[name])
        shapes = {**spec.shapes, **{name: tuple(p.shape) for name, p in parameters.items()}}
        wider = replace(spec, shapes=shapes)
        new = {name: p.detach() for name, p in parameters.items()}
        tokenizer = extended_by(base.tokenizer, tokens, "the soup")
        return cls(tokens, spec, wider, old, new, first), replace(base, tokenizer=tokenizer)

    def left_out(self, update: DeltaFile) -> list[str]:
        """Describe what the soup omits of an update: roles and properties of tokens, rows without a token."""
        ours = {t.text: t.flags for t in (*self.tokens.tokens, *self.tokens.changed)}
        own = (*update.vocabulary.tokens, *update.vocabulary.changed)
        roles = update.vocabulary.roles.items()
        return [
            *(f"{role}: {plain(text, 40)!r}" for role, text in roles if self.tokens.roles.get(role) != text),
            *(f"properties of {plain(t.text, 40)!r}" for t in own if ours.get(t.text) != t.flags),
            *(
                f"rows of {name} without a token, whose change has norm {norm:.3g}"
                for name in self.new
                if (norm := self._norm_without_tokens(update, name))
            ),
        ]

    def _norm_without_tokens(self, update: DeltaFile, name: str) -> float:
        """Return the norm of an update's change of the base's unused rows, except those of its own tokens."""
        old = self.old[name].float().cpu()
        change = update.decode(name).clone() if name in update else torch.zeros(old.shape)
        if update.added_rows is not None:
            first = update.added_rows.first
            change[first:] = update.decode_added(name)[: len(old) - first] - old[first:]
        change[[token.id for token in update.vocabulary.tokens if token.id < len(old)]] = 0.0
        return float(change[min(self.first, len(old)) :].norm())

    def restate(self, update: DeltaFile, path: Path) -> None:
        """Write an update against the wider base; other tensors are copied.

        Raises:
            GymError: ``BASE_MISMATCH`` for added tokens that are not in the union.
        """
        known = {token.text: token.id for token in self.tokens.tokens}
        if missing := [t.text for t in update.vocabulary.tokens if t.text not in known]:
            raise GymError(
                ErrorCode.BASE_MISMATCH,
                f"{update.path}: adds the tokens {shown_tokens(missing)}, which no merged update has",
                "omit them, or merge an update that has them",
            )
        entries = [_copied(update, name) for name in update.names if name not in self.new]
        for name, whole in self.new.items():
            delta, first = torch.zeros(whole.shape), min(self.first, len(self.old[name]))
            if name in update:
                delta[:first] = update.decode(name)[:first]
            for text, row in _rows_by_token(update, name).items():
                delta[known[text]] = row - whole[known[text]].float().cpu()
            if bool(delta.any()):
                entries.append(DeltaEntry.of(name, delta, "dense", dtype="float32"))
        write_delta(path, entries, self.wider, update.manifest.extra)

    def split(self, merged: DeltaFile, path: Path) -> VocabularyChange:
        """Write a soup of rewritten updates against the original base, without the rows of added tokens.

        Returns:
            The added tokens and their rows, for ``attach_vocabulary``.
        """
        entries = [_copied(merged, name) for name in merged.names if name not in self.new]
        rows: dict[str, Tensor] = {}
        for name, whole in self.new.items():
            delta = merged.decode(name) if name in merged else torch.zeros(whole.shape)
            first = min(self.first, len(self.old[name]))
            if self.tokens.tokens:
                rows[name] = whole[first:].float().cpu() + delta[first:]
            base_rows = delta[: len(self.old[name])].clone()
            base_rows[first:] = 0.0
            if bool(base_rows.any()):
                entries.append(DeltaEntry.of(name, base_rows, "dense", dtype="float32"))
        write_delta(path, entries, self.spec, merged.manifest.extra)
        return VocabularyChange(self.tokens, first, rows)


def _union(updates: Sequence[DeltaFile], first: int) -> AddedTokens:
    """Number the added tokens in order of first appearance; if roles or properties differ, the first ones are kept."""
    by_text: dict[str, AddedToken] = {}
    changed: dict[int, AddedToken] = {}
    roles: dict[str, str] = {}
    for update in updates:
        for token in update.vocabulary.tokens:
            by_text.setdefault(token.text, token)
        changed = {**{token.id: token for token in update.vocabulary.changed}, **changed}
        roles = {**update.vocabulary.roles, **roles}
    tokens = tuple(replace(token, id=number) for number, token in enumerate(by_text.values(), first))
    return AddedTokens(tokens, roles, tuple(changed[number] for number in sorted(changed)))


def _median_rows(updates: Sequence[DeltaFile], tokens: AddedTokens, name: str, base: Tensor) -> Tensor:
    """Return the median row of each token over the updates that have it, ``[tokens, ...]`` float32."""
    medians = torch.zeros(len(tokens.tokens), *base.shape[1:])
    own = [_rows_by_token(update, name) for update in updates]
    for median, token in zip(medians, tokens.tokens, strict=True):
        stacked = torch.stack([rows[token.text] for rows in own if token.text in rows])
        median.copy_(stacked.quantile(0.5, dim=0))
    return medians


def _rows_by_token(update: DeltaFile, name: str) -> dict[str, Tensor]:
    """Return an update's rows of its added tokens, float32."""
    if not update.vocabulary.tokens or update.added_rows is None:
        return {}
    rows, first = update.decode_added(name), update.added_rows.first
    return {token.text: rows[token.id - first] for token in update.vocabulary.tokens}


def _copied(delta: DeltaFile, name: str) -> DeltaEntry:
    record = delta.record(name)
    payload = functools.partial(delta.payload, name)
    return DeltaEntry(name, record.shape, record.codec, record.params, payload)
