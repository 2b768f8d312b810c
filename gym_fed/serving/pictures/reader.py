"""Pictures of a model's prompts, from the request to the engine: their tokens first, and their features last."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from gym_fed.modeling.processors import load_processor
from gym_fed.serving.forward.picture_rows import PlacedPicture
from gym_fed.serving.pictures.encoder import PictureEncoder
from gym_fed.serving.pictures.families import FAMILIES
from gym_fed.serving.pictures.processor import PictureProcessor, ProcessedPicture

if TYPE_CHECKING:
    from gym_fed.serving.pictures.decoding import Picture


@dataclass(frozen=True, eq=False)
class PictureRun:
    """A picture in a prompt, whose features may not be computed yet.

    Attributes:
        start: First token of its run.
        picture: It.
        processed: Its tokens and input.
    """

    start: int
    picture: Picture
    processed: ProcessedPicture


@dataclass(frozen=True, eq=False)
class ExpandedPrompt:
    """A prompt in which every picture has its tokens.

    Attributes:
        ids: Token ids.
        runs: The pictures, in order.
    """

    ids: list[int]
    runs: tuple[PictureRun, ...] = ()

    def __len__(self) -> int:
        return len(self.ids)


class PictureReader:
    """Reads the pictures of one model's prompts; from any thread.

    Args:
        processor: Of the model.
        encoder: Of the model.
    """

    def __init__(self, processor: PictureProcessor, encoder: PictureEncoder) -> None:
        self.processor, self.encoder = processor, encoder

    @classmethod
    def open(cls, name: str, model: Any) -> PictureReader | None:
        """Of a vision model that is loaded; None for a model of text, and for a family whose pictures are not read.

        Args:
            name: Where its processor is.
            model: It.

        Raises:
            GymError: As ``load_processor`` and ``PictureProcessor``.
        """
        family = FAMILIES.get(model.config.model_type) if hasattr(model, "get_image_features") else None
        if family is None:
            return None
        processor = PictureProcessor(load_processor(name), family, int(model.config.image_token_id))
        return cls(processor, PictureEncoder(model))

    @property
    def chat_template(self) -> str | None:
        """Of the processor, which may have one where the tokenizer has none."""
        found = self.processor.chat_template
        return found if isinstance(found, str) else None

    def places(self, ids: Sequence[int]) -> int:
        """How many pictures a prompt has places for."""
        return list(ids).count(self.processor.image_token_id)

    def expand(
        self, ids: Sequence[int], pictures: Sequence[tuple[Picture, ProcessedPicture]]
    ) -> ExpandedPrompt:
        """A prompt with one token for each picture, as the chat template writes it, with all of their tokens."""
        found: list[int] = []
        runs: list[PictureRun] = []
        left = iter(pictures)
        for token in ids:
            if token != self.processor.image_token_id:
                found.append(token)
                continue
            picture, processed = next(left)
            runs.append(PictureRun(len(found), picture, processed))
            found += processed.run
        return ExpandedPrompt(found, tuple(runs))

    def placed(self, prompt: ExpandedPrompt, owner: str) -> tuple[PlacedPicture, ...]:
        """The pictures of a prompt for the engine: their features are computed, unless the owner's are kept.

        Raises:
            GymError: As ``PictureEncoder.features``.
        """
        return tuple(
            PlacedPicture(
                run.start,
                len(run.processed.run),
                run.processed.places,
                self.encoder.features(run.picture, run.processed, owner),
                run.picture.digest,
            )
            for run in prompt.runs
        )
