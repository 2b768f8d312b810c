"""The pictures of a prompt: which tokens take a picture's features as embeddings, and how they enter KV block keys.

A picture is a run of tokens. Where the model's picture token occurs in it, a feature replaces the embedding. Two
prompts with the same tokens and different pictures are different, so the key of a KV block includes the pictures.
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
        start: The first token of its run.
        length: The number of tokens of its run.
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
        """True if its places lie in its run, and each has a feature."""
        inside = all(0 <= place < self.length for place in self.places)
        return inside and self.features.ndim == 2 and len(self.features) == len(self.places)


@dataclass(frozen=True, eq=False)
class EmbeddedRows:
    """Tokens of a chunk or step whose embeddings are given.

    Attributes:
        rows: The rows of the tokens.
        features: The feature of each, ``[rows, hidden]``.
    """

    rows: list[int]
    features: Tensor

    def put(self, hidden: Tensor) -> None:
        """Write the features over the embeddings ``[tokens, hidden]``."""
        rows = torch.tensor(self.rows, device=hidden.device)
        hidden.index_copy_(0, rows, self.features.to(hidden.device, hidden.dtype))


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


def rows_of_step(parts: Sequence[tuple[int, EmbeddedRows | None]]) -> EmbeddedRows | None:
    """Join the features of a step's chunks, each given with its first token."""
    present = [(at, part) for at, part in parts if part is not None]
    if not present:
        return None
    rows = [at + row for at, part in present for row in part.rows]
    return EmbeddedRows(rows, torch.cat([part.features for _, part in present]))


def block_key(token_ids: Sequence[int], pictures: Sequence[PlacedPicture], start: int, stop: int) -> Hashable:
    """Return a key for the tokens ``[start, stop)`` of a prompt: their ids, and the parts of pictures among them."""
    tokens = array("q", token_ids[start:stop]).tobytes()
    marks = [
        (picture.digest, picture.start - start)
        for picture in pictures
        if picture.start < stop and picture.start + picture.length > start
    ]
    return (tokens, *marks) if marks else tokens
