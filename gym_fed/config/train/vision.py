"""Settings of models that read images: which parts are frozen, and the size of images. Names are LLaMA-Factory's."""

from __future__ import annotations

from pydantic import Field, model_validator

from gym_fed.config.schema.base import StrictModel


class VisionSections(StrictModel):
    """Keys of the YAML's top level."""

    freeze_vision_tower: bool = True
    """Freeze the part that reads images under every ``finetuning``; it gets no adapters."""

    freeze_multi_modal_projector: bool = True
    """Freeze the projector between the vision tower and the language model."""

    freeze_language_model: bool = False
    """Freeze the language model, its embeddings and its head."""

    image_max_pixels: int | None = Field(default=None, ge=1)
    """Images with more pixels (width times height) are scaled down before the processor."""

    image_min_pixels: int | None = Field(default=None, ge=1)
    """Images with fewer pixels are scaled up."""

    @model_validator(mode="after")
    def _validate_pixels(self) -> VisionSections:
        least, most = self.image_min_pixels, self.image_max_pixels
        if least is not None and most is not None and least > most:
            raise ValueError(f"image_min_pixels: {least} is above image_max_pixels, {most}")
        return self
