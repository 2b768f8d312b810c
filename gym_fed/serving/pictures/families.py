"""Which families of vision models are served: those whose language model sees a picture as it sees ordinary tokens.

Positions count tokens one by one, attention is causal, and a picture enters by embeddings alone. What differs in that
would be answered wrongly, so every family is tried by a test before its name stands here.
"""

from __future__ import annotations

from dataclasses import dataclass

from gym_fed.core.errors import ErrorCode, GymError


@dataclass(frozen=True)
class Family:
    """A type of model, as ``config.json`` names it.

    Attributes:
        in_parts: The processor's setting that says whether large pictures are read in parts; None: it has none.
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
_WHY = {
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
    """Why a family's pictures are not read."""
    return _WHY.get(kind, "this family has not been tried")


def require_family(name: str, kind: str | None) -> None:
    """Refuse a vision model of another family; None is a model of text.

    Raises:
        GymError: ``MODEL_INVALID``.
    """
    if kind is not None and kind not in FAMILIES:
        raise GymError(
            ErrorCode.MODEL_INVALID,
            f"{name}: is a {kind} model, which reads images, and cannot be served: {why_not(kind)}",
            f"serve a model of {', '.join(FAMILIES)}, or this one by vLLM or llama.cpp",
        )
