"""Pictures of a model's prompts, from the request to the engine: their tokens first, and their features last."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gym_fed.base.modeling.processors import load_processor
from gym_fed.base.models import resolve
from gym_fed.core.json_files import read_object
from gym_fed.serving.pictures.encoder import PictureEncoder
from gym_fed.serving.pictures.processor import (
    FAMILIES,
    PictureProcessor,
    ProcessedPicture,
    require_wanted,
    why_not,
)

if TYPE_CHECKING:
    from gym_fed.serving.forward.picture_rows import PlacedPicture
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


@dataclass(frozen=True)
class NoPictures:
    """In the place of a ``PictureReader`` where pictures are refused.

    Attributes:
        why: For the refusal.
    """

    why: str = "This server computes text models alone"


class PictureReader:
    """Reads the pictures of one model's prompts; from any thread.

    Args:
        processor: Of the model.
        encoder: Of the model.
    """

    def __init__(self, processor: PictureProcessor, encoder: PictureEncoder) -> None:
        self.processor, self.encoder = processor, encoder

    @classmethod
    def open(cls, name: str, model: Any) -> PictureReader | NoPictures:
        """Of a model that is loaded; none of a model of text, and of a family whose pictures are not read.

        Args:
            name: Where its processor is.
            model: It.

        Raises:
            GymError: As ``load_processor`` and ``PictureProcessor``.
        """
        if getattr(model.config, "vision_config", None) is None:
            kind = _vision_type(
                Path(resolve(name))
            )  # of some vision models the language model alone was loaded
            return NoPictures() if kind is None else _not_read(kind)
        if (family := FAMILIES.get(model.config.model_type)) is None:
            return _not_read(model.config.model_type)
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
            GymError: As ``PictureEncoder.features`` and ``require_wanted``.
        """
        from gym_fed.serving.forward.picture_rows import PlacedPicture  # which imports torch

        placed = []
        for run in prompt.runs:
            require_wanted()
            features = self.encoder.features(run.picture, run.processed, owner)
            length, places = len(run.processed.run), run.processed.places
            placed.append(PlacedPicture(run.start, length, places, features, run.picture.digest))
        return tuple(placed)


def _not_read(kind: str) -> NoPictures:
    return NoPictures(f"Pictures of {kind} models are not read here, as {why_not(kind)}")


def _vision_type(folder: Path) -> str | None:
    """The type of a folder's model, if that has a part that reads pictures."""
    with suppress(OSError, ValueError, AttributeError):  # loading has said so
        config = read_object(folder / "config.json")
        return str(config.get("model_type")) if "vision_config" in config else None
    return None
