"""Read the audio clips and videos of a request from data URLs and base64, within limits; nothing is fetched.

A child process decodes them (``gym_fed.core.media``).
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import re
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Literal

from gym_fed.base.modeling.media_inputs import frames_to_read, sound_rate, video_metadata
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.core.media.reading import VideoFacts, read_sound, read_video

MAX_CLIP_BYTES = 6 * 2**20
MAX_SOUND_SECONDS = 120.0
MAX_VIDEO_SECONDS = 120.0
MAX_DECODING_SECONDS = 60.0
"""Time limit for decoding one video, in seconds."""
_FORMATS = ("wav", "mp3", "flac", "ogg")
_VIDEO_URL = re.compile(r"data:video/[\w.+-]{1,40}(?:;[\w.+=-]{1,60}){0,2};base64,", re.ASCII)
_SOUND = "send the base64 of a WAV, MP3, FLAC or Ogg file as data, and its format"
_VIDEO = "send an MP4 or WebM file as data:video/mp4;base64,..."


@dataclass(frozen=True, eq=False)
class Clip:
    """An audio clip or video that is not decoded yet.

    Attributes:
        kind: The kind of medium.
        data: The bytes of its file.
        digest: The digest of the file.
    """

    kind: Literal["audio", "video"]
    data: bytes
    digest: bytes

    @property
    def pixels(self) -> int:
        """Zero, since the frames are limited when the video is decoded."""
        return 0

    def inputs(self, processor: Any, max_pixels: int) -> dict[str, Any]:
        """Decode it, and return the processor's arguments.

        Args:
            processor: The processor of the model; only its settings are read.
            max_pixels: Maximum number of pixels of all frames together, checked before they are decoded.

        Raises:
            GymError: ``USAGE`` for a broken file; ``TOO_LARGE`` above a limit; ``INTERRUPTED`` if the client has
                disconnected.
        """
        name = "audio" if self.kind == "audio" else "video"
        try:
            if self.kind == "audio":
                rate = sound_rate(processor)
                samples = read_sound(self.data, rate, MAX_SOUND_SECONDS)
                return {"audio": [samples], "audio_kwargs": {"sampling_rate": rate}}

            def choose(facts: VideoFacts) -> list[int]:
                indices = frames_to_read(processor, facts)
                if (pixels := len(indices) * facts.frame_pixels) > max_pixels:
                    raise GymError(
                        ErrorCode.TOO_LARGE,
                        f"has {pixels:,} pixels in {len(indices)} frames; at most {max_pixels:,} are allowed",
                        "make it shorter or smaller, or send fewer at once",
                    )
                return indices

            frames, facts, indices = read_video(
                self.data,
                choose,
                MAX_VIDEO_SECONDS,
                time_limit=MAX_DECODING_SECONDS,
                before_call=require_wanted,
            )
        except GymError as error:
            if error.code not in (ErrorCode.USAGE, ErrorCode.TOO_LARGE):
                raise
            raise GymError(error.code, f"the {name} {error.message}", error.hint) from error
        metadata = [video_metadata(facts, indices)]
        return {"videos": [frames], "videos_kwargs": {"do_sample_frames": False, "video_metadata": metadata}}


def read_clip_of_sound(data: str, format: str) -> Clip:
    """Read OpenAI's ``input_audio``: base64 and the name of the format.

    Raises:
        GymError: ``USAGE`` for an unknown format or invalid base64; ``TOO_LARGE`` above a limit.
    """
    if format not in _FORMATS:
        raise GymError(ErrorCode.USAGE, f"audio format {format[:40]!r} is not supported", _SOUND)
    return _clip("audio", data, "audio", _SOUND)


def read_clip_of_video(url: str) -> Clip:
    """Read a video in a data URL.

    Raises:
        GymError: See ``read_clip_of_sound``.
    """
    match = _VIDEO_URL.match(url[:300])
    if match is None:
        web = url[:8].lower().startswith(("http:", "https:"))
        why = "is a web URL, but this server does not download media" if web else "is not a base64 data URL"
        raise GymError(ErrorCode.USAGE, f"the video {why}", _VIDEO)
    return _clip("video", url[match.end() :], "video", _VIDEO)


def _clip(kind: Literal["audio", "video"], text: str, name: str, remedy: str) -> Clip:
    if len(text) > MAX_CLIP_BYTES // 3 * 4 + 4:
        raise GymError(
            ErrorCode.TOO_LARGE, f"the {name} has more than {MAX_CLIP_BYTES:,} bytes", "make it shorter"
        )
    try:
        data = base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        raise GymError(ErrorCode.USAGE, f"the {name} has broken base64", remedy) from error
    return Clip(kind, data, hashlib.sha256(f"{kind}:".encode() + data).digest())


is_wanted: ContextVar[Callable[[], bool]] = ContextVar("is_wanted", default=lambda: True)
"""A function that returns False once the client has disconnected; set by the caller in its own context."""


def require_wanted() -> None:
    """Stop reading media if the client has disconnected.

    Raises:
        GymError: ``INTERRUPTED`` if it has disconnected.
    """
    if not is_wanted.get()():
        raise GymError(ErrorCode.INTERRUPTED, "the client has disconnected")
