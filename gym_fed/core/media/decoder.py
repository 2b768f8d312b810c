"""Decode sound and video; these functions run in the child process of ``gym_fed.core.bounded``.

The bytes are untrusted. FFmpeg's playlists and file lists can open other addresses. So a file's format is determined
from its first bytes, must be one of a few, and is never guessed by FFmpeg.
"""

from __future__ import annotations

import base64
from array import array
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from io import BytesIO
from pathlib import Path
from typing import Any

from gym_fed.core.errors import ErrorCode, GymError

MAX_PIXELS = 2**24
"""Maximum number of pixels per frame in the file."""
MAX_FRAME_PIXELS = 2**20
"""Pixels to which larger frames are scaled down."""
MAX_RATIO = 50
"""Maximum ratio of the longer side of a frame to the shorter one: processors enlarge the shorter one."""
MAX_PACKETS = 1_000_000
_CODECS = {
    "audio": ("aac", "mp3", "flac", "vorbis", "opus", "alac"),
    "video": ("h264", "hevc", "vp8", "vp9", "av1", "mpeg4", "mjpeg"),
}
"""The decoders, besides PCM, that untrusted bytes may reach; FFmpeg has a hundred more."""
_HEAD_BYTES = 16
_REMEDY = "save audio as WAV, FLAC, MP3 or Ogg, and video as MP4 or WebM"


def decode_sound(source: dict[str, str], rate: int, max_seconds: float) -> dict[str, Any]:
    """Decode the first audio stream of a file to mono.

    Args:
        source: ``path``, or ``data`` in base64.
        rate: Samples per second of the result.
        max_seconds: Maximum duration.

    Returns:
        ``samples``: float32 in base64.
    """
    import av
    import numpy as np

    chunks: list[Any] = []
    count, most = 0, int(max_seconds * rate)
    with _opened(source, "audio") as (container, stream):
        resampler = av.AudioResampler(format="flt", layout="mono", rate=rate)
        for frame in _and_end(container.decode(stream)):
            for resampled in resampler.resample(frame):
                samples = resampled.to_ndarray()[0]
                chunks.append(samples)
                count += len(samples)
            if count > most:
                raise GymError(
                    ErrorCode.TOO_LARGE, f"is longer than {max_seconds:g} s", "cut it into shorter files"
                )
    if not count:
        raise GymError(ErrorCode.USAGE, "contains no audio", _REMEDY)
    samples = np.concatenate(chunks, dtype=np.float32)
    chunks.clear()  # the child's memory holds only a few copies of 10 minutes of samples
    return {"samples": base64.b64encode(samples.data).decode("ascii")}


def probe_video(source: dict[str, str], max_seconds: float) -> dict[str, Any]:
    """Return the properties of a file's first video stream, without decoding it.

    Returns:
        ``frames``, ``fps``, ``width``, ``height``, ``seconds``, and ``times``: the time of each frame in the order of
        display, int64 in base64, in the stream's unit.
    """
    times = array("q")
    with _opened(source, "video") as (container, stream):
        width, height, fps = stream.width, stream.height, float(stream.average_rate or 0)
        for packet in container.demux(stream):
            if packet.pts is not None and not packet.is_discard:
                times.append(packet.pts)
            if len(times) > MAX_PACKETS:
                break
    frames = len(times)
    if not frames or not fps:
        raise GymError(ErrorCode.USAGE, "has no frames in it", _REMEDY)
    seconds = frames / fps
    if seconds > max_seconds or frames > MAX_PACKETS:
        raise GymError(ErrorCode.TOO_LARGE, f"is longer than {max_seconds:g} s", "cut it into shorter files")
    encoded = base64.b64encode(array("q", sorted(times))).decode("ascii")
    return {
        "frames": frames,
        "fps": fps,
        "width": width,
        "height": height,
        "seconds": seconds,
        "times": encoded,
    }


def decode_frames(
    source: dict[str, str], times: Sequence[int], size: Sequence[int] | None = None
) -> dict[str, Any]:
    """Decode frames of a file's first video stream to RGB, scaled down to ``MAX_FRAME_PIXELS``.

    Decoding starts at the last key frame before the first of them.

    Args:
        source: ``path``, or ``data`` in base64.
        times: The times of the frames as ``probe_video`` returns them, in ascending order. A missing frame is replaced
            by the next one, or by the last frame of the video.
        size: Width and height of the result; by default those of the first frame, scaled.

    Returns:
        ``width``, ``height``, and ``frames``: uint8 ``[height, width, 3]`` each, in base64.
    """
    frames: list[str] = []
    for frame in _frames_from(source, times[0]):
        size = size or _scaled(frame.width, frame.height)
        due = sum(time <= frame.pts for time in times) - len(frames)
        frames += [_rgb(frame, size)] * due if due > 0 else []
        if len(frames) == len(times):
            break
    else:
        if size is None:
            raise GymError(ErrorCode.USAGE, "has no frames in it", _REMEDY)
        frames += [_rgb(frame, size)] * (len(times) - len(frames))
    return {"width": size[0], "height": size[1], "frames": frames}


def _frames_from(source: dict[str, str], time: int) -> Iterator[Any]:
    """Yield the decoded frames of a video from a key frame at or before ``time``, or from the beginning."""
    import av

    for seeks in (True, False):
        with _opened(source, "video") as (container, stream):
            if seeks:
                with suppress(av.error.FFmpegError):  # decoded from the beginning
                    container.seek(time, stream=stream)
            is_first = True
            for frame in container.decode(stream):
                if frame.pts is None:
                    continue
                _require_size(frame.width, frame.height)
                if seeks and is_first and frame.pts > time:
                    break  # the index of the file is wrong
                is_first = False
                yield frame
            if not is_first:
                return


def _rgb(frame: Any, size: Sequence[int]) -> str:
    array = frame.reformat(width=size[0], height=size[1], format="rgb24").to_ndarray()
    return base64.b64encode(array.tobytes()).decode("ascii")


def _scaled(width: int, height: int) -> tuple[int, int]:
    factor = min(1.0, (MAX_FRAME_PIXELS / (width * height)) ** 0.5)
    return max(1, int(width * factor)), max(1, int(height * factor))


def _require_size(width: int, height: int) -> None:
    if not 0 < width * height <= MAX_PIXELS:
        raise GymError(
            ErrorCode.TOO_LARGE,
            f"has {width:,} x {height:,} pixels; {MAX_PIXELS:,} are allowed",
            "make it smaller",
        )
    if max(width, height) > MAX_RATIO * min(width, height):
        raise GymError(
            ErrorCode.TOO_LARGE,
            f"has {width:,} x {height:,} pixels; one side may be at most {MAX_RATIO} times as long as the other",
            "crop it",
        )


def _and_end(frames: Iterator[Any]) -> Iterator[Any]:
    """Yield the frames, and finally None, which flushes a resampler."""
    yield from frames
    yield None


@contextmanager
def _opened(source: dict[str, str], kind: str) -> Iterator[tuple[Any, Any]]:
    """Open a file's first stream of a kind, decoded by one thread; FFmpeg's errors become ``USAGE``."""
    import av

    name = "audio" if kind == "audio" else "video"
    try:
        data = source.get("data")
        with BytesIO(base64.b64decode(data)) if data else Path(source["path"]).open("rb") as file:
            format = _format_of(file.read(_HEAD_BYTES))
            file.seek(0)
            if format is None:
                raise GymError(ErrorCode.USAGE, f"is not a known {name} file", _REMEDY)
            with av.open(file, format=format, metadata_errors="ignore") as container:
                streams = getattr(container.streams, kind)
                if not streams:
                    raise GymError(ErrorCode.USAGE, f"contains no {name}", _REMEDY)
                codec = streams[0].codec_context.codec.canonical_name
                if codec not in _CODECS[kind] and not (kind == "audio" and codec.startswith("pcm_")):
                    raise GymError(
                        ErrorCode.USAGE,
                        f"is encoded as {codec}, which is not supported",
                        f"encode it as one of {', '.join(_CODECS[kind])}",
                    )
                if kind == "video":
                    _require_size(streams[0].width, streams[0].height)
                streams[0].thread_type = "NONE"
                streams[0].codec_context.thread_count = 1
                yield container, streams[0]
    except (av.error.FFmpegError, OSError, ValueError, IndexError) as error:
        raise GymError(ErrorCode.USAGE, f"cannot be decoded: {str(error)[:200]}", _REMEDY) from error


def _format_of(head: bytes) -> str | None:
    """Return FFmpeg's name for the format that a file's first bytes indicate; None if the format is not supported."""
    if head[:4] == b"RIFF":
        return {b"WAVE": "wav", b"AVI ": "avi"}.get(head[8:12])
    if head[4:8] == b"ftyp":
        return "mov"  # MP4, M4A and QuickTime
    for start, format in (
        (b"fLaC", "flac"),
        (b"OggS", "ogg"),
        (b"\x1aE\xdf\xa3", "matroska"),
        (b"ID3", "mp3"),
    ):
        if head.startswith(start):
            return format
    is_mpeg = len(head) > 1 and head[0] == 0xFF and head[1] & 0xE0 == 0xE0
    return "mp3" if is_mpeg else None
