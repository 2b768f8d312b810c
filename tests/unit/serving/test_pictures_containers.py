"""Only the parts of a picture file that make its pixels reach the decoder."""

from __future__ import annotations

import base64
import struct
import tracemalloc
import zlib
from io import BytesIO
from typing import Any

import pytest
from PIL import Image, ImageOps

from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.serving.pictures.decoding import (
    MAX_BLOCKS,
    MAX_PARTS,
    MAX_SCANS,
    Picture,
    TooManyParts,
    pixels_alone,
    read_picture,
)
from tests.support.vision_models import drawn

KINDS = ("jpeg", "png", "webp", "gif")


def saved(kind: str, image: Any = None, **how: Any) -> bytes:
    data = BytesIO()
    (image or drawn(1, 40, 24)).save(data, kind, **how)
    return data.getvalue()


def read(data: bytes) -> Picture:
    return read_picture(f"data:image/png;base64,{base64.b64encode(data).decode()}")


def segment(kind: int, body: bytes) -> bytes:
    return bytes((0xFF, kind)) + struct.pack(">H", len(body) + 2) + body


def chunk(kind: bytes, body: bytes) -> bytes:
    return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))


def many_exif_entries(count: int, size: int) -> bytes:
    """EXIF data whose entries all have the same bytes."""
    start = 8 + 2 + 12 * count + 4
    entries = b"".join(struct.pack("<HHII", tag, 7, size, start) for tag in range(count))
    return b"II*\0" + struct.pack("<IH", 8, count) + entries + bytes(4 + size)


def with_segments(segments: bytes) -> bytes:
    data = saved("jpeg")
    return data[:2] + segments + data[2:]


def with_chunks(chunks: bytes) -> bytes:
    data = saved("png")
    return data[:33] + chunks + data[33:]


def with_blocks(blocks: bytes) -> bytes:
    """Before a GIF's first frame."""
    data = saved("gif")
    at = 13 + (3 << (data[10] % 8 + 1))
    return data[:at] + blocks + data[at:]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("orientation", range(1, 9))
def test_pixels_are_those_of_the_whole_file(kind: str, orientation: int) -> None:
    exif = Image.Exif()
    exif[0x010F], exif[0x0112] = "a camera", orientation
    how: dict[str, Any] = {} if kind == "gif" else {"exif": exif, "icc_profile": bytes(90_000)}
    data = saved(kind, **how)
    wanted = ImageOps.exif_transpose(Image.open(BytesIO(data))).convert("RGB")
    found = read(data).decoded()
    assert (found.size, found.tobytes()) == (wanted.size, wanted.tobytes())


@pytest.mark.parametrize("kind", ["png", "gif", "webp", "mpo"])
def test_of_several_frames_the_first_is_kept(kind: str) -> None:
    frames = [drawn(seed, 40, 24) for seed in range(3)]
    data = saved(kind, frames[0], save_all=True, append_images=frames[1:])
    wanted = Image.open(BytesIO(data)).convert("RGB")
    assert read(data).decoded().tobytes() == wanted.tobytes()
    if kind != "webp":
        assert len(pixels_alone(data)[0]) < len(data) * 0.6


@pytest.mark.parametrize(
    "data",
    [
        with_segments(segment(0xE1, b"Exif\0\0" + many_exif_entries(1000, 40_000))),
        with_chunks(chunk(b"eXIf", many_exif_entries(2000, 100_000))),
        with_chunks(chunk(b"zTXt", b"key\0\0" + zlib.compress(bytes(1 << 20))) * 20),
        with_segments(segment(0xE1, b"Exif\0\0x") * 5000),
        with_blocks(b"!\xfe" + (b"\xff" + b"c" * 255) * 5000 + b"\0"),
    ],
    ids=["exif of a jpeg", "exif of a png", "texts", "many exif segments", "a long comment"],
)
def test_what_makes_no_pixels_is_not_read(data: bytes) -> None:
    read(saved("png")).decoded()  # imports are not counted
    assert len(pixels_alone(data)[0]) < 10_000
    tracemalloc.start()
    try:
        read(data).decoded()
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 5 * len(data) + 1_000_000


@pytest.mark.parametrize(
    ("data", "what"),
    [
        (with_segments(segment(0xFE, b"") * MAX_PARTS), "segments"),
        (with_chunks(chunk(b"IDAT", b"") * MAX_PARTS), "chunks"),
        (saved("webp") + b"ABCD\0\0\0\0" * MAX_PARTS, "chunks"),
        (with_blocks(b"!\xfe\x01c\0" * (MAX_BLOCKS // 2 + 1)), "blocks"),
    ],
    ids=["jpeg", "png", "webp", "gif"],
)
def test_many_parts_are_refused(data: bytes, what: str) -> None:
    with pytest.raises(TooManyParts, match=what):
        pixels_alone(data)
    with pytest.raises(GymError, match=what) as caught:
        read(data)
    assert caught.value.code is ErrorCode.TOO_LARGE
    assert caught.value.hint


def test_a_jpeg_of_many_scans_is_refused() -> None:
    data = saved("jpeg", progressive=True)
    last = data[data.rindex(b"\xff\xda") : -2]
    scans = data.count(b"\xff\xda")
    for more, fits in ((MAX_SCANS - scans, True), (MAX_SCANS - scans + 1, False)):
        repeated = data[:-2] + last * more + data[-2:]
        if fits:
            assert read(repeated).decoded().size == (40, 24)
        else:
            with pytest.raises(GymError, match="scans"):
                read(repeated)


def test_a_long_run_of_fill_bytes_is_passed_in_one_go() -> None:
    """A search that began anew at each of them would take hours."""
    data = with_segments(b"\xff" * 4_000_000 + b"\0")
    assert len(pixels_alone(data)[0]) > 0
