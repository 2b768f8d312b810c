"""Scaling of images into a range of pixels before the processor, keeping their shape."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from gym_fed.config.train.training import TrainingConfig


@dataclass(frozen=True)
class ImageLimits:
    """The least and most pixels (width times height); None leaves it to the processor."""

    least: int | None = None
    most: int | None = None

    @classmethod
    def of(cls, config: TrainingConfig) -> ImageLimits:
        """Return the limits of a config."""
        return cls(config.image_min_pixels, config.image_max_pixels)

    def size(self, width: int, height: int) -> tuple[int, int]:
        """Return width and height within the limits, rounded down to whole pixels, at least one each."""
        if self.most is not None and width * height > self.most:
            return _scaled(width, height, self.most)
        if self.least is not None and width * height < self.least:
            return _scaled(width, height, self.least)
        return width, height

    def fit(self, image: Any) -> Any:
        """Return a ``PIL.Image`` within the limits; the same one if it is within them already."""
        target = self.size(*image.size)
        return image if target == image.size else image.resize(target)


def _scaled(width: int, height: int, pixels: int) -> tuple[int, int]:
    factor = math.sqrt(pixels / (width * height))
    return max(1, int(width * factor)), max(1, int(height * factor))
