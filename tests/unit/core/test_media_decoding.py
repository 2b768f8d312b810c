"""Sound and video are decoded in a child process, within limits, whatever the bytes are."""

from __future__ import annotations

import base64
import threading
from pathlib import Path

import numpy as np
import pytest

from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.core.media import decoder, reading
from gym_fed.core.media.reading import read_sound, read_video
from tests.support.media_models import sound, video


def test_a_sound_is_resampled_to_the_rate_that_is_asked_for(tmp_path: Path) -> None:
    samples = read_sound(sound(0.5, 440.0, rate=8000), 16_000)
    assert samples.dtype == np.float32
    assert len(samples) == 8000
    spectrum = np.abs(np.fft.rfft(samples))
    assert abs(int(spectrum.argmax()) * 2 - 440) <= 4
    (tmp_path / "a.wav").write_bytes(sound())
    url = "data:audio/wav;base64," + base64.b64encode(sound()).decode()
    assert np.array_equal(read_sound(tmp_path / "a.wav", 16_000), read_sound(url, 16_000))


def test_chosen_frames_of_a_video_are_returned_in_order() -> None:
    frames, facts, indices = read_video(video(frames=20, fps=10), lambda facts: [0, 10, facts.frames - 1])
    assert (facts.frames, facts.fps, facts.width, facts.height, facts.seconds) == (20, 10.0, 64, 48, 2.0)
    assert (frames.shape, indices) == ((3, 48, 64, 3), [0, 10, 19])
    means = frames.mean(axis=(1, 2, 3))
    assert means == pytest.approx([0, 60, 114], abs=3)


@pytest.mark.parametrize(
    ("format", "codec", "options"),
    [
        ("avi", "mpeg4", {"bf": "2"}),
        ("mp4", "libx264", {"g": "10"}),
        ("mp4", "libx264", {"g": "600"}),
        ("webm", "libvpx-vp9", {"g": "10"}),
    ],
)
def test_frames_of_several_calls_are_those_of_their_numbers(
    format: str, codec: str, options: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    data = video(40, format=format, codec=codec, options=options)
    whole, _, _ = read_video(data, lambda facts: range(facts.frames))
    assert whole.mean(axis=(1, 2, 3)) == pytest.approx([6 * number for number in range(40)], abs=5)
    monkeypatch.setattr(reading, "_CALL_BYTES", 2 * 3 * 64 * 48)
    calls: list[None] = []
    numbers = [0, 3, 4, 13, 20, 21, 38, 90]
    parts, _, _ = read_video(data, lambda _facts: numbers, before_call=lambda: calls.append(None))
    assert len(calls) == 4
    assert np.array_equal(parts, whole[[*numbers[:-1], 39]])


def test_frames_late_in_a_video_are_decoded_from_a_key_frame_near_them() -> None:
    source = {"data": base64.b64encode(video(40, codec="libx264", options={"g": "10"})).decode()}
    first = next(decoder._frames_from(source, 35 * 1024))
    assert first.pts == 30 * 1024


def test_the_time_of_all_calls_for_a_video_is_limited() -> None:
    with pytest.raises(GymError, match="needs more than 0 s to decode") as caught:
        read_video(video(), lambda _facts: [0], time_limit=0)
    assert caught.value.code is ErrorCode.TOO_LARGE


def test_a_strip_of_a_video_is_refused() -> None:
    with pytest.raises(
        GymError, match="has 1,024 x 16 pixels; one side may be at most 50 times as long as the other"
    ):
        read_video(video(2, width=1024, height=16), lambda _facts: [0])


def test_a_codec_that_is_not_listed_is_refused() -> None:
    with pytest.raises(GymError, match="is encoded as ffv1, which is not supported") as caught:
        read_video(video(2, format="matroska", codec="ffv1"), lambda _facts: [0])
    assert "h264" in caught.value.hint


def test_large_frames_are_scaled_down() -> None:
    frames, facts, _ = read_video(video(frames=2, width=1600, height=1200), lambda _facts: [0])
    assert facts.is_scaled
    assert frames.shape[1] * frames.shape[2] <= 2**20
    assert frames.shape[2] / frames.shape[1] == pytest.approx(4 / 3, rel=1e-2)


@pytest.mark.parametrize(
    ("data", "code"),
    [
        (b"", ErrorCode.USAGE),
        (b"#EXTM3U\nhttp://127.0.0.1:1/a.ts\n", ErrorCode.USAGE),
        (b"ffconcat version 1.0\nfile /etc/passwd\n", ErrorCode.USAGE),
        (b"RIFF1234WAVEjunkjunkjunk", ErrorCode.USAGE),
        (video()[:500], ErrorCode.USAGE),
        (video(), ErrorCode.USAGE),
    ],
)
def test_what_is_no_sound_is_refused(data: bytes, code: ErrorCode) -> None:
    with pytest.raises(GymError) as caught:
        read_sound(data, 16_000)
    assert caught.value.code is code
    assert caught.value.hint


def test_limits_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(GymError, match="is longer than 1 s") as caught:
        read_sound(sound(2.0), 16_000, max_seconds=1.0)
    assert caught.value.code is ErrorCode.TOO_LARGE
    with pytest.raises(GymError, match="is longer than 1 s"):
        read_video(video(frames=20, fps=10), lambda _facts: [0], max_seconds=1.0)
    with pytest.raises(GymError, match="has 2000 frames to read; 768 are allowed"):
        read_video(video(), lambda _facts: list(range(2000)))
    monkeypatch.setattr(reading, "MAX_URL_BYTES", 100)
    for source in (sound(), "data:audio/wav;base64," + base64.b64encode(sound()).decode()):
        with pytest.raises(GymError, match="has more than 100 bytes"):
            read_sound(source, 16_000)


def test_another_kind_of_address_is_refused() -> None:
    for url in ("https://example.org/a.wav", "data:text/plain;base64,AA==", "data:audio/wav,AA"):
        with pytest.raises(GymError, match=r"is not a file|is not a base64 data URL"):
            read_sound(url, 16_000)


def test_media_leave_processes_for_other_evaluations(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "_SECONDS", 5.0)
    assert len(read_sound(sound(0.1), 16_000)) == 1600
    monkeypatch.setattr(reading, "_free", threading.BoundedSemaphore(1))
    monkeypatch.setattr(reading, "_SECONDS", 0.01)
    with reading._free, pytest.raises(GymError) as caught:
        read_sound(sound(0.1), 16_000)
    assert caught.value.code is ErrorCode.BUSY
    assert reading._free.acquire(blocking=False)
