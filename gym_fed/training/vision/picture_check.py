"""Decode the images of rows to find broken ones before a run."""

from __future__ import annotations

from dataclasses import dataclass, field

from gym_fed.core.errors import GymError
from gym_fed.core.text import counted, plain
from gym_fed.data.rows import Row
from gym_fed.training.vision.media import bad_medium, source_of

_SHOWN = 5
_DECODED_PIXELS = (64, 64)
"""Size to which JPEG files are scaled while decoding, which reads the whole file but takes much less time."""


@dataclass
class PictureCheck:
    """Counts the images of rows that cannot be decoded.

    Attributes:
        pictures: The number of images that were checked.
        broken: The number of images that cannot be decoded.
        first: Descriptions of the first broken images, with their positions.
    """

    pictures: int = 0
    broken: int = 0
    first: list[str] = field(default_factory=list)

    def add(self, place: str, row: Row) -> None:
        """Decode the images of a row."""
        for picture in row.get("images") or ():
            self.pictures += 1
            try:
                _decode(source_of(picture, "images", place), place)
            except GymError as error:
                self.broken += 1
                if len(self.first) < _SHOWN:
                    self.first.append(error.message)

    def describe(self) -> str:
        """Return a sentence about the broken images."""
        return (
            f"{self.broken} of {counted(self.pictures, 'image')} cannot be read; training rejects their rows"
        )


def _decode(source: str, place: str) -> None:
    from PIL import Image
    from transformers.image_utils import load_image

    try:
        if source.startswith("data:"):
            load_image(source)
            return
        with Image.open(source) as image:
            image.draft(image.mode, _DECODED_PIXELS)
            image.load()
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        problem = f"cannot be read: {plain(str(error), 120)}"
        raise bad_medium(place, "images", source, problem, "use a PNG, JPEG or WebP file") from error
