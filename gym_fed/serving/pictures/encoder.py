"""Features of pictures, by the model's own vision tower and projector: computed once, and kept for the next turn."""

from __future__ import annotations

import threading
from collections import OrderedDict
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.serving.pictures.decoding import Picture
from gym_fed.serving.pictures.processor import ProcessedPicture

if TYPE_CHECKING:
    from torch import Tensor

CACHE_BYTES = 256 * 2**20
OWNER_BYTES = 2 * 2**30
"""Of features in the requests of one owner, those that wait too: 16 pictures of a model of 8B may have 750 MB."""


class PictureEncoder:
    """Computes features; from any thread, one picture at a time, beside the engine's steps.

    The vision tower is used by nothing else. What is kept is found again by its owner alone.

    Args:
        model: The vision model; only read.
        cache_bytes: Most bytes of features that are kept.
        owner_bytes: Most bytes of features in one owner's requests that are not kept.
    """

    def __init__(self, model: Any, cache_bytes: int = CACHE_BYTES, owner_bytes: int = OWNER_BYTES) -> None:
        self._model, self._limit, self._owner_limit = model, cache_bytes, owner_bytes
        self._used: WeakValueDictionary[tuple[str, bytes], Tensor] = WeakValueDictionary()
        self._lock = threading.Lock()
        self._kept: OrderedDict[tuple[str, bytes], Tensor] = OrderedDict()
        self._bytes = 0
        self.computed = 0

    def features(self, picture: Picture, processed: ProcessedPicture, owner: str) -> Tensor:
        """``[places, hidden]``, on the model's device.

        Args:
            picture: Whose.
            processed: Of it.
            owner: Whose features are found: time shows nobody what others sent.

        Raises:
            GymError: ``BUSY`` where the owner's requests have too many; ``INTERNAL`` where the model gives another
                number of features than its processor has places.
        """
        key = owner, picture.digest
        with self._lock:
            if (found := self._kept.get(key)) is not None:
                self._kept.move_to_end(key)
                return found
            if (found := self._used.get(key)) is None:
                self._require_room(owner)
                found = self._used[key] = self._compute(processed)
            self._keep(key, found)
            return found

    def _require_room(self, owner: str) -> None:
        used = [(key[0], one.nbytes) for key, one in self._used.items() if key not in self._kept]
        if sum(size for whose, size in used if whose == owner) >= self._owner_limit:
            raise GymError(
                ErrorCode.BUSY,
                "the requests of this user that wait or run have as many pictures as there is memory for",
                "try again when some are answered",
            )

    def _compute(self, processed: ProcessedPicture) -> Tensor:
        import torch

        weights = next(self._model.parameters())
        inputs = {
            key: value.to(weights.device, weights.dtype if value.is_floating_point() else None)
            for key, value in processed.inputs.items()
        }
        with torch.inference_mode():
            output = self._model.get_image_features(**inputs, return_dict=True).pooler_output
            parts = output if isinstance(output, list | tuple) else [output]
            found = torch.cat([part.reshape(-1, part.shape[-1]) for part in parts])
        if len(found) != len(processed.places):
            raise GymError(
                ErrorCode.INTERNAL,
                f"a picture has {len(found)} features for {len(processed.places)} tokens",
                "the model's config.json and processor_config.json do not fit each other: restore them",
            )
        self.computed += 1
        return found

    def _keep(self, key: tuple[str, bytes], found: Tensor) -> None:
        self._kept[key] = found
        self._bytes += found.nbytes
        while self._bytes > self._limit and self._kept:
            _, dropped = self._kept.popitem(last=False)
            self._bytes -= dropped.nbytes
