"""Pictures in a prompt: which of its tokens take a picture's features for their embeddings, and which KV blocks differ.

A picture is a run of tokens. Where the model's picture token stands in it, a feature takes the embedding's place. Two
prompts with the same tokens and other pictures are two prompts, so the key of a KV block has the picture, too.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class PlacedPicture:
    """A picture in a prompt.

    Attributes:
        start: First token of its run.
        length: Tokens of its run.
        places: Which tokens of the run take a feature, in order; the others separate its parts.
        features: ``[places, hidden]``.
        digest: The digest of the picture, and of how it was read.
    """

    start: int
    length: int
    places: Sequence[int]
    features: Tensor
    digest: bytes

    @property
    def whole(self) -> bool:
        """True if its run has its places, and each of them a feature."""
        inside = all(0 <= place < self.length for place in self.places)
        return inside and self.features.ndim == 2 and len(self.features) == len(self.places)


@dataclass(frozen=True, eq=False)
class EmbeddedRows:
    """Tokens of a chunk or step whose embeddings are given.

    Attributes:
        rows: The rows of the tokens.
        features: The features of each, ``[rows, hidden]``.
    """

    rows: list[int]
    features: Tensor

    def put(self, hidden: Tensor) -> None:
        """Write them over the embeddings ``[tokens, hidden]``."""
        rows = torch.tensor(self.rows, device=hidden.device)
        hidden.index_copy_(0, rows, self.features.to(hidden.device, hidden.dtype))


def rows_between(pictures: Sequence[PlacedPicture], start: int, stop: int) -> EmbeddedRows | None:
    """What the pictures give to the tokens ``[start, stop)`` of their prompt; None: nothing."""
    rows: list[int] = []
    features: list[Tensor] = []
    for picture in pictures:
        first = bisect_left(picture.places, start - picture.start)
        last = bisect_left(picture.places, stop - picture.start)
        if first < last:
            rows += [picture.start + place - start for place in picture.places[first:last]]
            features.append(picture.features[first:last])
    return EmbeddedRows(rows, torch.cat(features)) if rows else None


def rows_of_step(parts: Sequence[tuple[int, EmbeddedRows | None]]) -> EmbeddedRows | None:
    """What pictures give to the tokens of a step; of each chunk its first token, and what they give to the chunk."""
    found = [(at, part) for at, part in parts if part is not None]
    if not found:
        return None
    rows = [at + row for at, part in found for row in part.rows]
    return EmbeddedRows(rows, torch.cat([part.features for _, part in found]))


def block_key(token_ids: Sequence[int], pictures: Sequence[PlacedPicture], start: int, stop: int) -> Hashable:
    """What the tokens ``[start, stop)`` of a prompt are: their ids, and of every picture among them which part."""
    tokens = array("q", token_ids[start:stop]).tobytes()
    marks = [
        (picture.digest, picture.start - start)
        for picture in pictures
        if picture.start < stop and picture.start + picture.length > start
    ]
    return (tokens, *marks) if marks else tokens
