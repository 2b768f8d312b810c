"""Load the images, sounds and videos of rows, and prepare them with the model's own processor."""

from __future__ import annotations

import base64
import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from inspect import signature
from pathlib import Path
from typing import Any

from gym_fed.base.modeling.media_inputs import (
    DEFAULT_FPS,
    PROCESSOR_ERRORS,
    frames_to_read,
    sound_part,
    sound_rate,
    video_metadata,
)
from gym_fed.base.modeling.processors import media_of
from gym_fed.config.train.training import TrainingConfig
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.core.media.decoder import MAX_FRAME_PIXELS
from gym_fed.core.media.reading import MAX_FRAMES, MAX_SOUND_SECONDS, read_sound, read_video
from gym_fed.core.text import counted
from gym_fed.data.rows import MEDIA, Row

_SHOWN = 60


@dataclass(frozen=True)
class ImageLimits:
    """The minimum and maximum number of pixels (width times height) of images; None for no limit."""

    min_pixels: int | None = None
    max_pixels: int | None = None

    @classmethod
    def of(cls, config: TrainingConfig) -> ImageLimits:
        """Return the limits in a config."""
        return cls(config.image_min_pixels, config.image_max_pixels)

    def size(self, width: int, height: int) -> tuple[int, int]:
        """Return width and height within the limits, rounded down to whole pixels, at least one each."""
        if self.max_pixels is not None and width * height > self.max_pixels:
            return _scaled(width, height, self.max_pixels)
        if self.min_pixels is not None and width * height < self.min_pixels:
            return _scaled(width, height, self.min_pixels)
        return width, height

    def fit(self, image: Any) -> Any:
        """Return a ``PIL.Image`` resized to the limits, or the same object if it is within them."""
        target = self.size(*image.size)
        return image if target == image.size else image.resize(target)


def _scaled(width: int, height: int, pixels: int) -> tuple[int, int]:
    factor = math.sqrt(pixels / (width * height))
    return max(1, int(width * factor)), max(1, int(height * factor))


@dataclass
class MediaCounts:
    """Counts of truncated sounds, and of video frames that are read."""

    sounds_cut: int = 0
    videos: int = 0
    frames: int = 0
    frames_read: int = 0
    videos_scaled: int = 0


class MediaProcessor:
    """Loads the media of rows, and converts rows to the model's inputs.

    A row has ``text``, the rendered conversation, and the sources of ``images``, ``audios`` and ``videos``.
    """

    def __init__(self, processor: Any, limits: ImageLimits | None = None) -> None:
        self.processor, self.limits = processor, limits or ImageLimits()
        self.counts = MediaCounts()

    @cached_property
    def kinds(self) -> frozenset[str]:
        """The media columns that the processor reads."""
        return media_of(self.processor)

    @cached_property
    def sound_rate(self) -> int:
        """Sample rate of the sounds that the processor reads, in Hz."""
        return sound_rate(self.processor)

    def inputs(self, rows: Sequence[Row], places: Sequence[str] | None = None) -> Any:
        """Return the model's inputs for rows, padded on the right, with the offsets of their tokens.

        Args:
            rows: The rows.
            places: The names of the rows in error messages.

        Raises:
            GymError: ``DATA_INVALID`` for a medium that cannot be read, or for a template that does not write a
                placeholder for each medium.
        """
        names = places or [f"row {number}" for number in range(1, len(rows) + 1)]
        named = list(zip(rows, names, strict=True))
        given: dict[str, Any] = {}
        images = [[self._image(source, name) for source in row["images"]] for row, name in named]
        sounds = [self._sound(source, name) for row, name in named for source in row["audios"]]
        videos = [[self._video(source, name) for source in row["videos"]] for row, name in named]
        if any(images):
            given["images"] = images
        if sounds:
            given |= {"audio": sounds, "audio_kwargs": {"sampling_rate": self.sound_rate}}
        if any(videos):
            given["videos"] = [[frames for frames, _ in row] for row in videos]
            metadata = [facts for row in videos for _, facts in row]
            given["videos_kwargs"] = {"do_sample_frames": False, "video_metadata": metadata}
        try:
            return self.processor(
                text=[row["text"] for row in rows],
                return_text_replacement_offsets=True,
                return_tensors="pt",
                text_kwargs={
                    "padding": True,
                    "padding_side": "right",
                    "add_special_tokens": False,  # the chat template already writes them
                    "return_offsets_mapping": True,
                },
                **given,
            )
        except PROCESSOR_ERRORS as error:
            if not given:
                raise GymError(
                    ErrorCode.DATA_INVALID,
                    f"{names[0]}: some rows have no media, but {type(self.processor).__name__} needs media in each row",
                    "use rows with images or audio, or train a text model",
                ) from error
            if not given.keys() & signature(type(self.processor).__call__).parameters.keys():  # Voxtral
                raise GymError(
                    ErrorCode.DATA_INVALID,
                    f"{names[0]}: {type(self.processor).__name__} takes media only in a chat format of its own",
                    "drop the media, or train a model such as Qwen2-Audio",
                ) from error
            raise GymError(
                ErrorCode.DATA_INVALID,
                f"{names[0]}: the model's processor rejects its media: {str(error)[:300]}",
                "use a chat template with a placeholder for each of them, or drop the row",
            ) from error

    def _image(self, source: str, place: str) -> Any:
        from transformers.image_utils import load_image

        try:
            return self.limits.fit(load_image(source))
        except (OSError, ValueError) as error:
            remedy = "use a PNG, JPEG or WebP file"
            raise bad_medium(place, "images", source, "cannot be read", remedy) from error

    def _sound(self, source: str, place: str) -> Any:
        try:
            sound = read_sound(source, self.sound_rate, MAX_SOUND_SECONDS)
        except GymError as error:
            raise _named(error, place, "audios", source) from error
        limit = self._max_samples
        self.counts.sounds_cut += limit is not None and len(sound) > limit
        return sound

    @cached_property
    def _max_samples(self) -> int | None:
        """The number of samples to which the processor truncates sounds; None if it does not truncate them."""
        import numpy as np

        limit = getattr(sound_part(self.processor), "n_samples", None)  # Whisper's front end: 30 seconds
        token = getattr(self.processor, "audio_token", None)
        if limit is None or token is None:
            return None
        sizes = []
        for length in (int(limit), 2 * int(limit)):
            given = {
                "audio": [np.zeros(length, np.float32)],
                "audio_kwargs": {"sampling_rate": self.sound_rate},
            }
            try:
                out = self.processor(text=[str(token)], return_tensors="pt", **given)
            except PROCESSOR_ERRORS:  # it rejects the rows too, and ``inputs`` reports it
                return None
            sizes.append(len(out["input_ids"][0]))
        return int(limit) if sizes[0] == sizes[1] else None

    def _video(self, source: Any, place: str) -> tuple[Any, dict[str, Any]]:
        """Return frames ``[n, height, width, 3]`` uint8, and the metadata that the processor expects."""
        if isinstance(source, list):
            return self._frame_list(source, place)
        try:
            frames, facts, indices = read_video(source, partial(frames_to_read, self.processor))
        except GymError as error:
            raise _named(error, place, "videos", str(source)) from error
        self.counts.videos += 1
        self.counts.frames += facts.frames
        self.counts.frames_read += len(indices)
        self.counts.videos_scaled += facts.is_scaled
        return frames, video_metadata(facts, indices)

    def _frame_list(self, sources: list[str], place: str) -> tuple[Any, dict[str, Any]]:
        import numpy as np

        if not 0 < len(sources) <= MAX_FRAMES:
            problem = f"has {counted(len(sources), 'frame')}; 1 to {MAX_FRAMES} are allowed"
            raise bad_medium(place, "videos", "a list", problem, "list fewer frames")
        images = [self._image(frame, place).convert("RGB") for frame in sources]
        (width, height), *others = dict.fromkeys(image.size for image in images)
        if others or width * height > MAX_FRAME_PIXELS:
            sizes = f"{width} x {height}" + (f" and {others[0][0]} x {others[0][1]}" if others else "")
            problem = f"has frames of {sizes} pixels"
            remedy = f"use the same size for all frames, at most {MAX_FRAME_PIXELS:,} pixels"
            raise bad_medium(place, "videos", sources[0], problem, remedy)
        frames = np.stack([np.asarray(image) for image in images])
        fps = float(getattr(self.processor.video_processor, "fps", None) or DEFAULT_FPS)
        indices = list(range(len(frames)))
        return frames, {"total_num_frames": len(frames), "fps": fps, "frames_indices": indices}


def source_of(medium: Any, column: str, place: str) -> Any:
    """Return a medium of a row as a JSON value: a path, a data URL, or a list of them (the frames of a video).

    Raises:
        GymError: ``DATA_INVALID`` for any other form, and for a URL on the network.
    """
    if isinstance(medium, list) and column == "videos":
        return [source_of(frame, "images", place) for frame in medium]
    if isinstance(medium, dict):
        if isinstance(medium.get("bytes"), bytes):
            return f"data:{MEDIA[column]}/unknown;base64,{base64.b64encode(medium['bytes']).decode()}"
        if "array" in medium and "sampling_rate" in medium:
            try:
                return _wave_url(medium["array"], int(medium["sampling_rate"]))
            except (TypeError, ValueError, struct.error) as error:
                problem = f"cannot be read: {error}"
                remedy = "set array to numbers, and sampling_rate to the samples per second"
                raise bad_medium(place, column, "an array of samples", problem, remedy) from error
        medium = medium.get("path")
    if isinstance(medium, Path):
        medium = str(medium)
    if not isinstance(medium, str):
        remedy = f"use paths of {MEDIA[column]} files"
        raise bad_medium(place, column, type(medium).__name__, "is not a path", remedy)
    if "://" in medium.split(",")[0]:
        raise bad_medium(place, column, medium, "is a URL", "download it, and use its path")
    return medium if medium.startswith("data:") else str(Path(medium).expanduser())


def _wave_url(samples: Any, rate: int) -> str:
    """Return samples as a data URL of a mono float32 WAV file. Channels (the shorter axis) are averaged.

    Raises:
        ValueError: For samples of any other shape or type, or a rate below 1.
    """
    import numpy as np

    values = np.asarray(samples, dtype="<f4")
    if values.ndim == 2:
        values = values.mean(axis=int(np.argmin(values.shape)), dtype="<f4")
    if values.ndim != 1 or not 1 <= rate < 2**30:
        raise ValueError(f"samples have {counted(values.ndim, 'dimension')}, but the rate is {rate}")
    data = values.tobytes()
    head = struct.pack("<4sI4s4sIHHIIHH4sI", b"RIFF", 36 + len(data), b"WAVE", b"fmt ", 16, 3, 1, rate, 4 * rate, 4, 32, b"data", len(data))  # fmt: skip  # noqa: E501
    return "data:audio/wav;base64," + base64.b64encode(head + data).decode()


def bad_medium(place: str, column: str, source: Any, problem: str, remedy: str) -> GymError:
    """Create the error for a medium of a row, with the row, the column and the medium."""
    text = str(source)
    shown = text if len(text) < 200 and not text.startswith("data:") else text[:_SHOWN] + "..."
    return GymError(ErrorCode.DATA_INVALID, f"{place}: {column}: {shown} {problem}", remedy)


def _named(error: GymError, place: str, column: str, source: str) -> GymError:
    if error.code is ErrorCode.MISSING_DEPENDENCY:
        return GymError(error.code, f"{place}: {column}: {error.message}", error.hint)
    return bad_medium(place, column, source, error.message, str(error.hint))
