"""Features of pictures in memory: those that are kept, and those of requests that wait, are bounded."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.serving.pictures.decoding import Picture
from gym_fed.serving.pictures.processor import ProcessedPicture
from gym_fed.serving.pictures.reader import PictureEncoder

BYTES = 4 * 8 * 4


class Tower(nn.Linear):
    """Four features of eight numbers for every picture."""

    def get_image_features(self, **_given: Any) -> Any:
        class Output:
            pooler_output = torch.zeros(1, 4, 8)

        return Output()


def features(encoder: PictureEncoder, number: int, owner: str = "ann") -> Any:
    picture = Picture(b"", 1, 1, "auto", bytes([number]))
    return encoder.features(picture, ProcessedPicture([1] * 4, [0, 1, 2, 3], {}), owner)


def test_features_in_the_requests_of_one_owner_are_bounded() -> None:
    encoder = PictureEncoder(Tower(8, 8), cache_bytes=2 * BYTES, owner_bytes=3 * BYTES)
    held = [features(encoder, number) for number in range(5)]
    with pytest.raises(GymError) as caught:
        features(encoder, 5)
    assert caught.value.code is ErrorCode.BUSY
    assert caught.value.hint
    assert features(encoder, 5, "ben") is not None
    held.clear()
    assert features(encoder, 5) is not None


def test_features_that_a_request_has_are_found_though_they_are_not_kept() -> None:
    encoder = PictureEncoder(Tower(8, 8), cache_bytes=BYTES)
    first = features(encoder, 0)
    for number in range(1, 4):
        features(encoder, number)
    computed = encoder.computed
    assert features(encoder, 0) is first
    assert encoder.computed == computed
    assert encoder._bytes == BYTES
