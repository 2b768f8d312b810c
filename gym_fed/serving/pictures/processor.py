"""A model's own processor, one picture at a time: the tokens that stand for it, and the vision tower's input."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.serving.pictures.decoding import Picture
from gym_fed.serving.pictures.families import Family

if TYPE_CHECKING:
    from torch import Tensor

_OF_TEXT = frozenset(("input_ids", "attention_mask", "token_type_ids", "mm_token_type_ids"))
_IN_ONE = 'leave detail out, or give "auto"'


@dataclass(frozen=True, eq=False)
class ProcessedPicture:
    """A picture as its model takes it.

    Attributes:
        run: Token ids that stand for it in a prompt.
        places: Which of them take a feature.
        inputs: Of ``get_image_features``.
    """

    run: list[int]
    places: list[int]
    inputs: dict[str, Tensor]


class PictureProcessor:
    """Prepares pictures; from any thread, one at a time.

    Args:
        processor: Of the model (``load_processor``); nothing else may use it.
        family: Of the model.
        image_token_id: The token that takes a feature.

    Raises:
        GymError: ``MODEL_INVALID`` where model and processor do not have the same token for pictures.
    """

    def __init__(self, processor: Any, family: Family, image_token_id: int) -> None:
        self._processor, self._family = processor, family
        self.image_token_id = image_token_id
        self.chat_template = processor.chat_template
        self._lock = threading.Lock()
        found = processor.tokenizer.convert_tokens_to_ids(processor.image_token)
        if found != image_token_id:
            raise GymError(
                ErrorCode.MODEL_INVALID,
                f"the processor writes token {found} for pictures, and the model reads {image_token_id}",
                "restore the model's config.json and processor_config.json",
            )

    def process(self, picture: Picture) -> ProcessedPicture:
        """The picture's tokens and input.

        Raises:
            GymError: ``USAGE`` for a broken picture, and for a ``detail`` that the model does not have.
        """
        settings = self._settings(picture)
        with self._lock:
            made = self._processor(
                images=[picture.decoded()],
                text=self._processor.image_token,
                add_special_tokens=False,
                return_tensors="pt",
                **settings,
            )
        run = [int(token) for token in made["input_ids"][0]]
        places = [at for at, token in enumerate(run) if token == self.image_token_id]
        return ProcessedPicture(run, places, {key: made[key] for key in made if key not in _OF_TEXT})

    def require_detail(self, picture: Picture) -> None:
        """Raises:
        GymError: ``USAGE`` for a ``detail`` that the model does not have.
        """
        self._settings(picture)

    def _settings(self, picture: Picture) -> dict[str, bool]:
        if picture.detail == "auto":
            return {}
        if self._family.in_parts is None:
            raise GymError(
                ErrorCode.USAGE, f"detail {picture.detail!r}: this model reads pictures in one way", _IN_ONE
            )
        return {self._family.in_parts: picture.detail == "high"}
