"""Models that read images: which of their parts stay as they are, and how large an image may be; LLaMA-Factory's words.

Of a model that reads text alone nothing is tower or projector, and images have no size there.
"""

from __future__ import annotations

from pydantic import Field, model_validator

from gym_fed.config.schema.base import StrictModel


class VisionSections(StrictModel):
    """Keys of the YAML's top level."""

    freeze_vision_tower: bool = True
    """Leave the part that reads images as it is, whatever ``finetuning`` is; adapters are not put on it."""

    freeze_multi_modal_projector: bool = True
    """The same for what carries the tower's output over to the language model."""

    freeze_language_model: bool = False
    """The same for the language model, its embeddings and its head."""

    image_max_pixels: int | None = Field(default=None, ge=1)
    """A larger image is made smaller before the processor sees it: width times height."""

    image_min_pixels: int | None = Field(default=None, ge=1)
    """A smaller image is made larger."""

    @model_validator(mode="after")
    def _sizes_in_order(self) -> VisionSections:
        least, most = self.image_min_pixels, self.image_max_pixels
        if least is not None and most is not None and least > most:
            raise ValueError(f"image_min_pixels: {least} is above image_max_pixels, {most}")
        return self
