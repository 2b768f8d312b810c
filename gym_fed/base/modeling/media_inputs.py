"""How a processor takes sound and video: its sampling rate, and its own rule for the frames of a video."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.core.media.reading import VideoFacts

SOUND_RATE = 16_000
"""Samples per second for processors that do not specify a rate."""
DEFAULT_FPS = 2.0
"""Frames per second to sample, and of a video given as a list of frames, if the processor does not specify a rate."""
PROCESSOR_ERRORS = (
    ArithmeticError,
    AttributeError,
    LookupError,
    RuntimeError,
    StopIteration,
    TypeError,
    ValueError,
)
"""What transformers' processors raise for media that they reject."""


def sound_part(processor: Any) -> Any:
    """Return the part of a processor that prepares sound; None without one."""
    return getattr(processor, "audio_processor", getattr(processor, "feature_extractor", None))


def sound_rate(processor: Any) -> int:
    """Return the samples per second that a processor takes."""
    return int(getattr(sound_part(processor), "sampling_rate", None) or SOUND_RATE)


def frames_to_read(processor: Any, facts: VideoFacts) -> list[int]:
    """Return the numbers of the frames that the processor's own rule samples from a video.

    Raises:
        GymError: ``USAGE`` if the rule does not fit the video, as with fewer frames than it takes.
    """
    from transformers.video_utils import VideoMetadata

    part = processor.video_processor
    metadata = VideoMetadata(
        total_num_frames=facts.frames,
        fps=facts.fps,
        width=facts.width,
        height=facts.height,
        duration=facts.seconds,
    )
    settings = {key: getattr(part, key, None) for key in part.valid_kwargs.__annotations__}
    if settings.get("fps") is None and settings.get("num_frames") is None:  # Qwen2-VL's files set neither
        settings["fps"] = DEFAULT_FPS
    if settings.get("num_frames") is not None:  # transformers takes one of them
        settings["fps"] = None
    try:
        return [int(index) for index in part.sample_frames(metadata=metadata, **settings)]
    except (ValueError, ZeroDivisionError, NotImplementedError, TypeError) as error:
        raise GymError(
            ErrorCode.USAGE,
            f"has {facts.frames} frames at {facts.fps:g} per second, which cannot be sampled: {str(error)[:200]}",
            "use a longer one, or set fps or num_frames in the processor's files",
        ) from error


def video_metadata(facts: VideoFacts, indices: Sequence[int]) -> dict[str, Any]:
    """Return the metadata of sampled frames in the form that processors take."""
    return {
        "total_num_frames": facts.frames,
        "fps": facts.fps,
        "width": facts.width,
        "height": facts.height,
        "duration": facts.seconds,
        "frames_indices": list(indices),
    }
