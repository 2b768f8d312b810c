"""The tokens of a step: the chunk of each request, the packed sequence, and the pictures among the tokens.

A picture is a run of a prompt's tokens. At each picture token in the run, a feature replaces the embedding.
Prompts with the same tokens may have different pictures, so the key of a KV block includes the pictures.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch
from gym_quant.kernels import attention as paged
from gym_quant.kernels import dispatch
from torch import Tensor
from torch.nn import functional

from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.serving.forward.kv_cache import KVCache, no_room
from gym_fed.serving.forward.padded import BatchAttention
from gym_fed.serving.forward.variant_weights import LoadedVariant

Position = tuple[int, int, int]
"""A position in time, height and width (M-RoPE); three equal numbers for a token of text."""


@dataclass(frozen=True)
class Chunk:
    """The tokens of one request in a step.

    Attributes:
        token_ids: A part of its prompt (prefill), or its newest token (decode); at least one.
        cache: The request's own cache, to which the tokens are appended.
        variant: The variant; None for the base.
        wants_logits: Whether to compute the logits after the last token.
        num_logits: The number of last tokens that get logits; scoring a text needs more than one.
        hidden: The mean of the last hidden states, for an embedding; None if not needed.
        pictures: The picture features that replace the embeddings of its tokens.
        positions: The position of each token, for a model with three-dimensional positions; None: those in the text.
    """

    token_ids: list[int]
    cache: KVCache
    variant: LoadedVariant | None = None
    wants_logits: bool = True
    hidden: HiddenMean | None = None
    num_logits: int = 1
    pictures: EmbeddedRows | None = None
    positions: list[Position] | None = None

    @property
    def rows(self) -> int:
        """The number of rows of logits that a step returns for the chunk."""
        return self.num_logits if self.wants_logits else 0

    @property
    def needs_states(self) -> bool:
        """True if the last hidden states are needed: for an embedding, or for the logits of added tokens."""
        added = self.variant is not None and self.variant.vocabulary is not None and self.wants_logits
        return self.hidden is not None or added


Masks = dict[tuple[int, int, int, int | None], Tensor]
"""Masks by numbers of tokens, keys and query heads per key head, and by window."""


@dataclass
class PackedTokens:
    """The position of each request's tokens in the packed sequence, and its cache; all caches belong to one pool."""

    spans: Sequence[tuple[int, int, KVCache]]
    """First token, token after the last, and cache, in order and without gaps. The caches have room for the tokens."""

    windows: dict[int, int | None] = field(default_factory=dict)
    """The sliding window that the model passed for each layer."""

    masks: Masks = field(default_factory=dict)

    batch: BatchAttention | None = None
    """The attention that replaces ``spans`` in evaluation."""

    pictures: EmbeddedRows | None = None
    """The picture features that replace the embeddings of tokens."""

    plain: bool = True
    """True if no layer caps its scores, has sinks, or a sliding window."""

    @cached_property
    def tables(self) -> paged.PagedSpans:
        """The block tables for all layers of the step."""
        return paged.PagedSpans([(a, b, cache.length, cache.blocks) for a, b, cache in self.spans])

    @cached_property
    def native(self) -> bool:
        """True if the kernels run native code instead of torch."""
        return dispatch.path() != "torch"


def reserve_room(chunks: Sequence[Chunk]) -> None:
    """Check the chunks of a step, and reserve room for their tokens in the caches.

    Raises:
        GymError: ``USAGE``, as in ``MultiVariantModel.step``.
    """
    if not chunks or not all(chunk.token_ids for chunk in chunks):
        raise GymError(ErrorCode.USAGE, "a step needs chunks of at least one token each")
    if not all(chunk.num_logits in range(1, len(chunk.token_ids) + 1) for chunk in chunks):
        raise GymError(ErrorCode.USAGE, "num_logits must be from 1 to the tokens of the chunk")
    if len({id(chunk.cache) for chunk in chunks}) != len(chunks):
        raise GymError(ErrorCode.USAGE, "two chunks of one step have the same cache")
    if len({id(chunk.cache.pool) for chunk in chunks}) != 1:
        raise GymError(ErrorCode.USAGE, "the chunks of one step have caches of different pools")
    for chunk in chunks:
        if not chunk.cache.reserve(len(chunk.token_ids)):
            raise no_room(len(chunk.token_ids))


def packed_tokens(chunks: Sequence[Chunk]) -> tuple[list[int], PackedTokens]:
    """Return the end of each chunk in the packed sequence, and the packed tokens; the caches must have room."""
    ends, spans, at = [], [], 0
    for chunk in chunks:
        spans.append((at, at + len(chunk.token_ids), chunk.cache))
        at += len(chunk.token_ids)
        ends.append(at)
    starts = [start for start, _, _ in spans]
    pictures = rows_of_step([(at, chunk.pictures) for at, chunk in zip(starts, chunks, strict=True)])
    return ends, PackedTokens(spans, pictures=pictures)


class HiddenMean:
    """The mean of the last hidden states of a text that is computed in chunks."""

    def __init__(self) -> None:
        self._sum: Tensor | None = None

    def add(self, states: Tensor) -> None:
        """Add the states of the next tokens: ``[tokens, hidden]``."""
        total = states.float().sum(dim=0)
        self._sum = total if self._sum is None else self._sum + total

    def unit(self) -> Tensor:
        """Return the mean scaled to length 1, computed from the sum: ``[hidden] float32``."""
        assert self._sum is not None
        mean: Tensor = self._sum / self._sum.norm().clamp_min(1e-12)
        return mean


@dataclass(frozen=True, eq=False)
class Embedded:
    """The features that replace the embeddings of a medium's tokens.

    Attributes:
        places: The tokens of the run whose embeddings are replaced, in order; its other tokens separate its parts.
        features: ``[places, hidden]``, or ``[places, hidden * (1 + n)]`` with features that are added after each of the
            first ``n`` layers (Qwen3-VL).
        positions: Three-dimensional positions of its tokens and of the next one, relative to the first.
    """

    places: list[int]
    features: Tensor
    positions: list[Position] | None = None


@dataclass(frozen=True, eq=False)
class PlacedPicture:
    """A picture in a prompt.

    Attributes:
        start: The first token of its run.
        length: The number of tokens of its run.
        embedded: The features that replace the embeddings of its run; the encoder keeps a weak reference to them.
        digest: The digest of the picture and of how it was read.
    """

    start: int
    length: int
    embedded: Embedded
    digest: bytes

    @property
    def places(self) -> list[int]:
        return self.embedded.places

    @property
    def features(self) -> Tensor:
        return self.embedded.features

    @property
    def positions(self) -> list[Position] | None:
        return self.embedded.positions

    @property
    def whole(self) -> bool:
        """True if all its placeholders are in its run, and each has a feature."""
        inside = all(0 <= place < self.length for place in self.places)
        return inside and self.features.ndim == 2 and len(self.features) == len(self.places)


@dataclass(frozen=True, eq=False)
class EmbeddedRows:
    """Tokens of a chunk or step whose embeddings are replaced.

    Attributes:
        rows: The rows of the tokens.
        features: The features of each token, ``[rows, hidden * (1 + n)]``; see ``PlacedPicture.features``.
    """

    rows: list[int]
    features: Tensor

    def put(self, hidden: Tensor) -> None:
        """Write the features over the embeddings ``[tokens, hidden]``."""
        rows, width = torch.tensor(self.rows, device=hidden.device), hidden.shape[1]
        hidden.index_copy_(0, rows, self.features[:, :width].to(hidden.device, hidden.dtype))

    def add(self, hidden: Tensor, layer: int) -> None:
        """Add the features of a layer to its output ``[tokens, hidden]``, if there are any."""
        rows, width = torch.tensor(self.rows, device=hidden.device), hidden.shape[1]
        part = self.features[:, (1 + layer) * width : (2 + layer) * width]
        if part.shape[1]:
            hidden.index_add_(0, rows, part.to(hidden.device, hidden.dtype))

    def num_layers(self, width: int) -> int:
        """Return the number of layers with their own features, by the width of the hidden states."""
        return self.features.shape[1] // width - 1


def rows_between(pictures: Sequence[PlacedPicture], start: int, stop: int) -> EmbeddedRows | None:
    """Return the features for the tokens ``[start, stop)`` of a prompt; None if there are none."""
    rows: list[int] = []
    features: list[Tensor] = []
    for picture in pictures:
        first = bisect_left(picture.places, start - picture.start)
        last = bisect_left(picture.places, stop - picture.start)
        if first < last:
            rows += [picture.start + place - start for place in picture.places[first:last]]
            features.append(picture.features[first:last])
    return EmbeddedRows(rows, torch.cat(features)) if rows else None


def positions_between(pictures: Sequence[PlacedPicture], start: int, stop: int) -> list[Position] | None:
    """Return the positions of the tokens ``[start, stop)`` of a text; None if they are one-dimensional.

    A picture begins at the position after the text before it.
    """
    if all(picture.positions is None for picture in pictures):
        return None
    positions: list[Position] = []
    at, shift = start, 0
    for picture in pictures:
        if picture.positions is None:
            continue
        end = picture.start + picture.length
        positions += [(number + shift,) * 3 for number in range(at, min(stop, picture.start))]
        first = picture.start + shift
        last = min(picture.length, max(0, stop - picture.start))
        inside = picture.positions[max(0, at - picture.start) : last]
        positions += [(first + t, first + h, first + w) for t, h, w in inside]
        at = max(at, min(stop, end))
        shift += picture.positions[picture.length][0] - picture.length
    return positions + [(number + shift,) * 3 for number in range(at, stop)]


def positions_of_step(chunks: Sequence[Chunk]) -> list[int] | list[Position]:
    """Return the position of each token of a step, in three dimensions if any chunk has such positions."""
    numbers = [range(c.cache.length, c.cache.length + len(c.token_ids)) for c in chunks]
    if all(chunk.positions is None for chunk in chunks):
        return [number for each in numbers for number in each]
    return [
        position
        for chunk, each in zip(chunks, numbers, strict=True)
        for position in chunk.positions or [(number,) * 3 for number in each]
    ]


def position_ids(positions: Sequence[int] | Sequence[Position], device: torch.device) -> Tensor:
    """Return position ids ``[1, tokens]``, or ``[3, 1, tokens]`` for positions in three dimensions."""
    ids = torch.tensor(list(positions), device=device)
    return ids[None] if ids.ndim == 1 else ids.T[:, None]


def rows_of_step(parts: Sequence[tuple[int, EmbeddedRows | None]]) -> EmbeddedRows | None:
    """Join the features of a step's chunks, each given with its first token."""
    present = [(at, part) for at, part in parts if part is not None]
    if not present:
        return None
    rows = [at + row for at, part in present for row in part.rows]
    width = max(part.features.shape[1] for _, part in present)
    features = [functional.pad(part.features, (0, width - part.features.shape[1])) for _, part in present]
    return EmbeddedRows(rows, torch.cat(features))


def block_key(token_ids: Sequence[int], pictures: Sequence[PlacedPicture], start: int, stop: int) -> Hashable:
    """Return a key for the tokens ``[start, stop)`` of a prompt: their ids, and the parts of pictures among them."""
    tokens = array("q", token_ids[start:stop]).tobytes()
    marks = [
        (picture.digest, picture.start - start)
        for picture in pictures
        if picture.start < stop and picture.start + picture.length > start
    ]
    return (tokens, *marks) if marks else tokens
