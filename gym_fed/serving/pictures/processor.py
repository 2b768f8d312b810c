"""Prepare pictures with a model's own image processor, for the families of vision models that are served.

A family is served if its language model sees a picture like ordinary tokens: positions count tokens one by one,
attention is causal, and a picture enters by embeddings alone. Others would be answered wrongly, so every family is
tested before it is listed here.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.serving.pictures.decoding import Picture

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Family:
    """A model type of ``config.json``.

    Attributes:
        in_parts: The processor's setting that splits large pictures into parts; None: there is none.
    """

    in_parts: str | None = None


FAMILIES = {
    "idefics3": Family("do_image_splitting"),
    "internvl": Family("crop_to_patches"),
    "llava": Family(),
    "llava_next": Family(),
    "mistral3": Family(),
    "smolvlm": Family("do_image_splitting"),
}

_POSITIONS = "its tokens have positions in two or three dimensions (M-RoPE)"
_MASKS = "the tokens of a picture attend to each other in both directions"
_UNREAD_REASONS = {
    "glm4v": _POSITIONS,
    "glm4v_moe": _POSITIONS,
    "qwen2_vl": _POSITIONS,
    "qwen2_5_vl": _POSITIONS,
    "qwen3_vl": _POSITIONS,
    "qwen3_vl_moe": _POSITIONS,
    "gemma3": _MASKS,
    "paligemma": _MASKS,
}


def why_not(kind: str) -> str:
    """Return the reason why a family's pictures are not read."""
    return _UNREAD_REASONS.get(kind, "this family has not been tried")


def require_family(name: str, kind: str | None) -> None:
    """Refuse a vision model of a family that is not served; None means a text model.

    Raises:
        GymError: ``MODEL_INVALID``.
    """
    if kind is not None and kind not in FAMILIES:
        raise GymError(
            ErrorCode.MODEL_INVALID,
            f"{name}: is a {kind} model, which reads images, and cannot be served: {why_not(kind)}",
            f"serve a model of {', '.join(FAMILIES)}, or this one by vLLM or llama.cpp",
        )


_OF_TEXT = frozenset(("input_ids", "attention_mask", "token_type_ids", "mm_token_type_ids"))
_IN_ONE = 'leave detail out, or give "auto"'


@dataclass(frozen=True, eq=False)
class ProcessedPicture:
    """A picture in the form that the model takes.

    Attributes:
        run: Token ids that represent it in a prompt.
        places: The tokens that take a feature.
        inputs: The arguments of ``get_image_features``.
    """

    run: list[int]
    places: list[int]
    inputs: dict[str, Tensor]


class PictureProcessor:
    """Prepares pictures, from any thread, one at a time.

    Args:
        processor: The processor of the model (``load_processor``); nothing else may use it.
        family: The family of the model.
        image_token_id: The token that takes a feature.

    Raises:
        GymError: ``MODEL_INVALID`` if the model's picture token differs from the processor's.
    """

    def __init__(self, processor: Any, family: Family, image_token_id: int) -> None:
        self._processor, self._family = processor, family
        self.image_token_id = image_token_id
        self.chat_template = processor.chat_template
        self._lock = threading.Lock()
        token_id = processor.tokenizer.convert_tokens_to_ids(processor.image_token)
        if token_id != image_token_id:
            raise GymError(
                ErrorCode.MODEL_INVALID,
                f"the processor writes token {token_id} for pictures, and the model reads {image_token_id}",
                "restore the model's config.json and processor_config.json",
            )

    def process(self, picture: Picture) -> ProcessedPicture:
        """Compute the picture's tokens and input.

        Raises:
            GymError: ``USAGE`` for a broken picture, and for a ``detail`` that the model does not have.
        """
        settings = self._settings(picture)
        with self._lock:
            processed = self._processor(
                images=[picture.decoded()],
                text=self._processor.image_token,
                add_special_tokens=False,
                return_tensors="pt",
                **settings,
            )
        run = [int(token) for token in processed["input_ids"][0]]
        places = [at for at, token in enumerate(run) if token == self.image_token_id]
        return ProcessedPicture(
            run, places, {key: processed[key] for key in processed if key not in _OF_TEXT}
        )

    def require_detail(self, picture: Picture) -> None:
        """Check that the model has the picture's ``detail``.

        Raises:
            GymError: ``USAGE``.
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


is_wanted: ContextVar[Callable[[], bool]] = ContextVar("is_wanted", default=lambda: True)
"""Function that returns False when nobody waits for the pictures any more; set by the caller in its own context."""


def require_wanted() -> None:
    """Stop reading pictures that nobody waits for.

    Raises:
        GymError: ``INTERRUPTED`` if nobody waits any more.
    """
    if not is_wanted.get()():
        raise GymError(ErrorCode.INTERRUPTED, "nobody waits for these pictures any more")
