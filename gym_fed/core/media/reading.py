"""Read sound and video from files and data URLs: check the sizes, then decode in a child process."""

from __future__ import annotations

import base64
import binascii
import re
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gym_fed.core.bounded.errors import LimitExceededError
from gym_fed.core.bounded.pool import MAX_PROCESSES, EvaluationError, evaluate, evaluation_deadline
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.core.media.decoder import MAX_FRAME_PIXELS, decode_frames, decode_sound, probe_video
from gym_fed.core.requirements import require_package
from gym_fed.core.text import counted

if TYPE_CHECKING:
    from numpy.typing import NDArray


MAX_FILE_BYTES = 2**30
"""Maximum size of a local file in bytes."""
MAX_URL_BYTES = 24 * 2**20
"""Maximum size of a data URL in bytes."""
MAX_SOUND_SECONDS = 600.0
MAX_VIDEO_SECONDS = 3600.0
MAX_FRAMES = 768
"""Maximum number of decoded frames per video."""
_SECONDS = 60.0
"""Time limit of one call to the child process."""
MAX_READ_SECONDS = 600.0
"""Time limit of all calls for one video."""
_free = threading.BoundedSemaphore(MAX_PROCESSES // 2)
"""Maximum number of child processes that decode media at once; the others stay free for chat templates."""
_CALL_BYTES = 32 * 2**20
"""Approximate maximum bytes of the frames of one call."""
_URL = re.compile(r"data:(audio|video|application)/[\w.+-]{1,60}(?:;[\w.+=-]{1,60}){0,4};base64,", re.ASCII)

Source = str | bytes | Path
"""A path, a data URL, or the bytes of a file."""


@dataclass(frozen=True)
class VideoFacts:
    """The properties of a video, read before its frames are decoded.

    Attributes:
        frames: The number of its frames.
        fps: Frames per second.
        width: Width in pixels.
        height: Height in pixels.
        seconds: Duration.
    """

    frames: int
    fps: float
    width: int
    height: int
    seconds: float

    @property
    def frame_pixels(self) -> int:
        """The number of pixels of a decoded frame."""
        return min(self.width * self.height, MAX_FRAME_PIXELS)

    @property
    def is_scaled(self) -> bool:
        """True if its frames are scaled down when they are decoded."""
        return self.width * self.height > MAX_FRAME_PIXELS


def read_sound(source: Source, rate: int, max_seconds: float = MAX_SOUND_SECONDS) -> NDArray[Any]:
    """Decode a sound to mono samples at ``rate``: float32 ``[samples]``.

    Raises:
        GymError: ``USAGE`` for a broken or unknown file, ``TOO_LARGE`` beyond a limit, ``MISSING_DEPENDENCY`` without
            PyAV. The message completes a sentence that starts with the name of the sound.
    """
    import numpy as np

    reply = _evaluated(decode_sound, source=_given(source), rate=rate, max_seconds=max_seconds)
    return np.frombuffer(base64.b64decode(reply["samples"]), dtype=np.float32).copy()


def read_video(
    source: Source,
    choose: Callable[[VideoFacts], Sequence[int]],
    max_seconds: float = MAX_VIDEO_SECONDS,
    *,
    time_limit: float = MAX_READ_SECONDS,
    before_call: Callable[[], None] = lambda: None,
) -> tuple[NDArray[Any], VideoFacts, list[int]]:
    """Decode chosen frames of a video.

    Args:
        source: The video.
        choose: Function that returns the numbers of the frames, in ascending order.
        max_seconds: Maximum duration.
        time_limit: Time limit in seconds.
        before_call: Called before each call to the child process; may raise to stop.

    Returns:
        The frames, uint8 ``[frames, height, width, 3]``; the properties of the video; the numbers of the frames.

    Raises:
        GymError: See ``read_sound``.
    """
    late = GymError(
        ErrorCode.TOO_LARGE, f"needs more than {time_limit:g} s to decode", "make it shorter or smaller"
    )
    with evaluation_deadline(time.monotonic() + time_limit, late):
        return _read_video(_given(source), choose, max_seconds, before_call)


def _read_video(
    given: dict[str, str],
    choose: Callable[[VideoFacts], Sequence[int]],
    max_seconds: float,
    before_call: Callable[[], None],
) -> tuple[NDArray[Any], VideoFacts, list[int]]:
    import numpy as np

    reply = _evaluated(probe_video, source=given, max_seconds=max_seconds)
    times = np.frombuffer(base64.b64decode(reply.pop("times")), dtype=np.int64)
    facts = VideoFacts(**reply)
    indices = sorted(int(index) for index in choose(facts))
    if not 0 < len(indices) <= MAX_FRAMES:
        raise GymError(
            ErrorCode.TOO_LARGE,
            f"has {len(indices)} frames to read; {MAX_FRAMES} are allowed",
            "cut it, or lower the processor's fps or max_frames",
        )
    wanted = [int(times[min(max(index, 0), len(times) - 1)]) for index in indices]
    at_once = max(1, _CALL_BYTES // (3 * facts.frame_pixels))
    frames: NDArray[Any] | None = None
    size = None
    for start in range(0, len(indices), at_once):
        before_call()
        reply = _evaluated(decode_frames, source=given, times=wanted[start : start + at_once], size=size)
        size = [reply["width"], reply["height"]]
        if frames is None:
            frames = np.empty((len(indices), size[1], size[0], 3), np.uint8)
        for at, frame in enumerate(reply["frames"], start):
            frames[at] = np.frombuffer(base64.b64decode(frame), dtype=np.uint8).reshape(frames.shape[1:])
    assert frames is not None  # there is at least one index
    return frames, facts, indices


def _given(source: Source) -> dict[str, str]:
    """Return a source in the form that the child process takes."""
    if isinstance(source, bytes):
        _require_bytes(len(source), MAX_URL_BYTES)
        return {"data": base64.b64encode(source).decode("ascii")}
    text = str(source)
    if not text.startswith("data:"):
        file = Path(text).expanduser()
        if not file.is_file():
            raise GymError(ErrorCode.USAGE, "is not a file", "correct its path")
        _require_bytes(file.stat().st_size, MAX_FILE_BYTES)
        return {"path": str(file.resolve())}
    match = _URL.match(text[:400])
    if match is None:
        raise GymError(
            ErrorCode.USAGE, "is not a base64 data URL of audio or video", "send data:audio/wav;base64,..."
        )
    data = text[match.end() :]
    _require_bytes(len(data) // 4 * 3, MAX_URL_BYTES)
    try:
        base64.b64decode(data, validate=True)
    except (binascii.Error, ValueError) as error:
        raise GymError(ErrorCode.USAGE, "has broken base64", "encode the file again") from error
    return {"data": data}


def _require_bytes(size: int, most: int) -> None:
    if size > most:
        raise GymError(ErrorCode.TOO_LARGE, f"has more than {counted(most, 'byte')}", "make it smaller")


def _evaluated(function: Callable[..., dict[str, Any]], **arguments: Any) -> dict[str, Any]:
    require_package("av", "reading audio or video", "media")
    if not _free.acquire(timeout=_SECONDS):
        raise GymError(
            ErrorCode.BUSY, f"waited {_SECONDS:g} s for other media to be decoded", "try again later"
        )
    try:
        reply: dict[str, Any] = evaluate(function, seconds=_SECONDS, **arguments)
    except LimitExceededError as error:
        raise GymError(
            ErrorCode.TOO_LARGE, f"{error.need} to decode", "make it shorter or smaller"
        ) from error
    except EvaluationError as error:
        raise GymError(ErrorCode.USAGE, f"cannot be decoded: {str(error)[:200]}", "save it again") from error
    finally:
        _free.release()
    return reply
