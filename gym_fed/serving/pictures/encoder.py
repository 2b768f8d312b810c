"""Compute the features of media once, and keep them for the requests of their owner."""

from __future__ import annotations

import threading
from collections import OrderedDict
from typing import TYPE_CHECKING
from weakref import WeakValueDictionary

from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.serving.pictures.embedding import MediumEmbedder
from gym_fed.serving.pictures.processor import Medium, ProcessedPicture

if TYPE_CHECKING:
    from gym_fed.serving.forward.chunk import Embedded

CACHE_BYTES = 256 * 2**20
OWNER_BYTES = 2 * 2**30
"""Maximum bytes of features in one owner's requests, including waiting ones: 16 pictures for an 8B model may need 750
MB."""


class PictureEncoder:
    """Computes picture features, from any thread, one picture at a time, in parallel with the engine's steps.

    Cached features are only reused for their owner.

    Args:
        embedder: Computes the features.
        cache_bytes: Maximum bytes of cached features.
        owner_bytes: Maximum bytes of features in one owner's requests that are not cached.
    """

    def __init__(
        self, embedder: MediumEmbedder, cache_bytes: int = CACHE_BYTES, owner_bytes: int = OWNER_BYTES
    ) -> None:
        self._embedder, self._limit, self._owner_limit = embedder, cache_bytes, owner_bytes
        self._used: WeakValueDictionary[tuple[str, bytes], Embedded] = WeakValueDictionary()
        self._lock = threading.Lock()
        self._kept: OrderedDict[tuple[str, bytes], Embedded] = OrderedDict()
        self._bytes = 0
        self.computed = 0

    def features(self, picture: Medium, processed: ProcessedPicture, owner: str) -> Embedded:
        """Return the features that replace the embeddings of its tokens, on the model's device.

        Args:
            picture: The picture.
            processed: Its tokens and input.
            owner: The owner of cached features; timing must not show what others sent.

        Raises:
            GymError: ``BUSY`` if the owner's requests have too many; as ``MediumEmbedder.embed``.
        """
        key = owner, picture.digest
        with self._lock:
            if (features := self._kept.get(key)) is not None:
                self._kept.move_to_end(key)
                return features
            if (features := self._used.get(key)) is None:
                self._require_room(owner)
                features = self._used[key] = self._embedder.embed(processed)
                self.computed += 1
            self._keep(key, features)
            return features

    def _require_room(self, owner: str) -> None:
        used = [(key[0], each.features.nbytes) for key, each in self._used.items() if key not in self._kept]
        if sum(size for whose, size in used if whose == owner) >= self._owner_limit:
            raise GymError(
                ErrorCode.BUSY,
                "this user's requests already fill the memory for pictures",
                "try again when some are answered",
            )

    def _keep(self, key: tuple[str, bytes], features: Embedded) -> None:
        self._kept[key] = features
        self._bytes += features.features.nbytes
        while self._bytes > self._limit and self._kept:
            _, dropped = self._kept.popitem(last=False)
            self._bytes -= dropped.features.nbytes
