"""Prepare pictures, audio and videos with a model's own processor, one at a time."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Any

from jinja2 import TemplateError

from gym_fed.base.modeling.media_inputs import PROCESSOR_ERRORS
from gym_fed.base.modeling.processors import media_of
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.data.rows import MEDIA
from gym_fed.serving.pictures.clips import Clip
from gym_fed.serving.pictures.decoding import MAX_REQUEST_PIXELS, Picture

Medium = Picture | Clip
NOUNS = {"image": "image", "audio": "audio clip", "video": "video"}
_SPLITTING = ("do_image_splitting", "crop_to_patches")
"""Settings of image processors that split large pictures into parts."""
_IN_ONE = 'omit detail, or send "auto"'


@dataclass(frozen=True, eq=False)
class ProcessedPicture:
    """A medium in the form that the model takes.

    Attributes:
        run: The token ids that represent it in a prompt.
        inputs: The arguments of the model's forward pass in addition to the ids.
        before: The special token that the chat template writes directly before it, which some models require.
        behind: The special token directly after it.
        pixels: The pixels of a video's decoded frames; 0 for others.
    """

    run: list[int]
    inputs: dict[str, Any]
    before: tuple[int, ...] = ()
    behind: tuple[int, ...] = ()
    pixels: int = 0


class PictureProcessor:
    """Prepares media, one at a time. Thread-safe.

    Args:
        processor: The processor of the model (``load_processor``), for exclusive use.

    Attributes:
        places: The kind of medium of each placeholder token of the chat template.
        is_numbered: True if a picture's tokens depend on the pictures before it.
    """

    is_numbered = False

    def __init__(self, processor: Any) -> None:
        self._processor = processor
        self.chat_template = processor.chat_template
        self._lock = threading.Lock()
        self._tokens: dict[str, str] = {}
        self.places: dict[int, str] = {}
        reads = {MEDIA[column] for column in media_of(processor)}
        for kind in NOUNS:
            token = getattr(processor, f"{kind}_token", None)
            number = processor.tokenizer.convert_tokens_to_ids(token) if isinstance(token, str) else None
            if kind in reads and isinstance(token, str) and number is not None:
                self._tokens[kind] = token
                self.places[int(number)] = kind
        self._frames = {kind: self._frame(token) for token, kind in self.places.items()}
        image_processor = getattr(processor, "image_processor", None)
        self._in_parts = next((name for name in _SPLITTING if hasattr(image_processor, name)), None)

    @property
    def kinds(self) -> frozenset[str]:
        """The kinds of media that have a placeholder in prompts."""
        return frozenset(self._tokens)

    def drop(self, kind: str) -> None:
        """Stop supporting a kind of media."""
        del self._tokens[kind]
        self.places = {token: name for token, name in self.places.items() if name != kind}

    def process(self, medium: Medium, max_pixels: int = MAX_REQUEST_PIXELS) -> ProcessedPicture:
        """Compute the tokens and input of a medium.

        Args:
            medium: The medium.
            max_pixels: Maximum number of pixels of the frames of a video.

        Raises:
            GymError: ``USAGE`` for a broken medium, one that the processor rejects, or a ``detail`` that the model does
                not support; ``TOO_LARGE`` above a limit.
        """
        kind = "image" if isinstance(medium, Picture) else medium.kind
        processed, pixels = self._processed(medium, self._tokens[kind], max_pixels=max_pixels)
        run = [int(token) for token in processed["input_ids"][0]]
        inputs = {key: processed[key] for key in processed if key != "input_ids"}
        return ProcessedPicture(run, inputs, *self._frames[kind], pixels)

    def check_numbers(self, picture: Picture) -> None:
        """Set ``is_numbered`` if a picture's tokens depend on earlier pictures (MiniCPM-V writes their numbers)."""
        token = self._tokens["image"]
        one, two = (
            self._processed(picture, token * count, count)[0]["input_ids"][0].tolist() for count in (1, 2)
        )
        self.is_numbered = two != one * 2

    def _processed(
        self, medium: Medium, text: str, count: int = 1, max_pixels: int = MAX_REQUEST_PIXELS
    ) -> tuple[Any, int]:
        """Return the output for a medium, or for several copies of a picture, and the pixels of its frames."""
        if isinstance(medium, Picture):
            pictures = [medium.decoded()] * count
            arguments: dict[str, Any] = {"images": pictures, "images_kwargs": self._settings(medium)}
        else:  # decode outside the lock, since this may take long
            arguments = medium.inputs(self._processor, max_pixels)
        pixels = sum(frames.size // 3 for frames in arguments.get("videos", ()))
        try:
            with self._lock:
                processed = self._processor(
                    text=[text], text_kwargs={"add_special_tokens": False}, return_tensors="pt", **arguments
                )
        except PROCESSOR_ERRORS as error:
            noun = NOUNS["image" if isinstance(medium, Picture) else medium.kind]
            raise GymError(
                ErrorCode.USAGE,
                f"the model's processor rejects the {noun}: {str(error)[:200]}",
                "send one with a different size or length",
            ) from error
        return processed, pixels

    def _frame(self, place: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return the special tokens that the chat template writes directly before and after a placeholder."""
        tokenizer = self._processor.tokenizer
        content = [{"type": "text", "text": "x"}, {"type": self.places[place]}, {"type": "text", "text": "x"}]
        try:
            ids = tokenizer.apply_chat_template(
                [{"role": "user", "content": content}],
                chat_template=self.chat_template,
                tokenize=True,
                return_dict=False,
            )
        except (TemplateError, TypeError, ValueError, KeyError, GymError):
            return (), ()
        if place not in ids:
            return (), ()
        at, special = ids.index(place), set(tokenizer.all_special_ids)
        special |= {number for number, token in tokenizer.added_tokens_decoder.items() if token.special}
        around = (ids[max(0, at - 1) : at], ids[at + 1 : at + 2])
        before, behind = (tuple(token for token in part if token in special) for part in around)
        return before, behind

    def require_detail(self, picture: Picture) -> None:
        """Check that the model supports the ``detail`` of the picture.

        Raises:
            GymError: ``USAGE``.
        """
        self._settings(picture)

    def _settings(self, picture: Picture) -> dict[str, bool]:
        if picture.detail == "auto":
            return {}
        if self._in_parts is None:
            raise GymError(
                ErrorCode.USAGE,
                f"detail {picture.detail!r}: this model supports only one detail level",
                _IN_ONE,
            )
        return {self._in_parts: picture.detail == "high"}
