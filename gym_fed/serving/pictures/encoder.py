"""Features of pictures, by the model's own vision tower and projector: computed once, and kept for the next turn."""

from __future__ import annotations

import threading
from collections import OrderedDict
from typing import TYPE_CHECKING, Any

from gym_fed.errors import ErrorCode, GymError
from gym_fed.serving.pictures.decoding import Picture
from gym_fed.serving.pictures.processor import ProcessedPicture

if TYPE_CHECKING:
    from torch import Tensor

CACHE_BYTES = 256 * 2**20


class PictureEncoder:
    """Computes features; from any thread, one picture at a time, beside the engine's steps.

    The vision tower is used by nothing else. What is kept is found again by its owner alone.

    Args:
        model: The vision model; only read.
        cache_bytes: Most bytes of features that are kept.
    """

    def __init__(self, model: Any, cache_bytes: int = CACHE_BYTES) -> None:
        self._model, self._limit = model, cache_bytes
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
            GymError: ``INTERNAL`` where the model gives another number of features than its processor has places.
        """
        key = owner, picture.digest
        with self._lock:
            if (found := self._kept.get(key)) is not None:
                self._kept.move_to_end(key)
                return found
            found = self._compute(processed)
            self._keep(key, found)
            return found

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
