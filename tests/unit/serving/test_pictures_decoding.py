"""Incoming pictures: nothing is fetched, and every bound is checked before the work that it bounds."""

from __future__ import annotations

import base64
import struct
import zlib
from io import BytesIO

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.serving.pictures.decoding import (
    MAX_PICTURE_BYTES,
    MAX_PICTURES,
    MAX_REQUEST_PIXELS,
    read_picture,
    require_limits,
)
from tests.support.vision_models import data_url, drawn


def url_of(data: bytes, kind: str = "image/png") -> str:
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"


def png(width: int, height: int, pixels: bytes = b"") -> bytes:
    """A PNG that says that it has this size, whatever follows."""

    def chunk(kind: bytes, body: bytes) -> bytes:
        return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))

    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", pixels) + chunk(b"IEND", b"")


def webp(width: int, height: int) -> bytes:
    """A WebP that says that its canvas has this size."""
    sizes = (width - 1).to_bytes(3, "little") + (height - 1).to_bytes(3, "little")
    body = b"WEBPVP8X" + struct.pack("<I", 10) + b"\0\0\0\0" + sizes
    return b"RIFF" + struct.pack("<I", len(body)) + body


@pytest.mark.parametrize("kind", ["png", "jpeg", "webp", "gif"])
def test_every_format_is_read(kind: str) -> None:
    drawing = drawn(1, 40, 24)
    picture = read_picture(data_url(drawing, kind))
    assert (picture.width, picture.height) == (40, 24)
    found = picture.decoded()
    assert (found.mode, found.size) == ("RGB", (40, 24))
    if kind == "png":
        assert found.tobytes() == drawing.tobytes()


def test_a_picture_is_turned_as_its_camera_says() -> None:
    data, exif = BytesIO(), Image.Exif()
    exif[0x0112] = 6
    drawn(1, 40, 24).save(data, "jpeg", exif=exif)
    assert read_picture(url_of(data.getvalue(), "image/jpeg")).decoded().size == (24, 40)


def test_of_several_frames_the_first_is_read() -> None:
    data = BytesIO()
    red, blue = (Image.new("RGB", (8, 8), colour) for colour in ("red", "blue"))
    red.save(data, "gif", save_all=True, append_images=[blue])
    pixel = read_picture(url_of(data.getvalue(), "image/gif")).decoded().getpixel((0, 0))
    assert pixel == (255, 0, 0)


@pytest.mark.parametrize(
    ("url", "why"),
    [
        ("https://example.org/cat.png", "does not download media"),
        ("HTTP://127.0.0.1/cat.png", "does not download media"),
        ("file:///etc/passwd", "is not a data URL"),
        ("/etc/passwd", "is not a data URL"),
        ("", "is not a data URL"),
        ("data:image/svg+xml;base64,AAAA", "svg"),
        ("data:text/html;base64,AAAA", "text/html"),
        ("data:image/png,AAAA", "not in base64"),
        ("data:image/png;base64,AA*A", "broken base64"),
        ("data:image/png;base64,AAA", "broken base64"),
        ("data:image/png;base64,", "or is broken"),
        (url_of(b"%!PS-Adobe-3.0 EPSF-3.0\n"), "or is broken"),
        (url_of(png(8, 8)[:20]), "or is broken"),
    ],
)
def test_what_is_no_picture_is_refused(url: str, why: str) -> None:
    with pytest.raises(GymError, match=why) as caught:
        read_picture(url)
    assert caught.value.code is ErrorCode.USAGE
    assert caught.value.hint


@pytest.mark.parametrize(
    ("data", "kind"),
    [
        (png(8192, 8192), "image/png"),
        (png(60_000, 60_000), "image/png"),
        (webp(16_000, 16_000), "image/webp"),
        (png(1, 100), "image/png"),
    ],
)
def test_too_many_pixels_are_refused_by_the_header(
    monkeypatch: pytest.MonkeyPatch, data: bytes, kind: str
) -> None:
    def unpacked(*_args: object) -> None:
        raise AssertionError("it was decompressed")

    monkeypatch.setattr("PIL.ImageFile.ImageFile.load", unpacked)
    with pytest.raises(GymError, match="pixels") as caught:
        read_picture(url_of(data, kind))
    assert caught.value.code is ErrorCode.TOO_LARGE


def test_too_many_bytes_are_refused_before_they_are_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    text = "data:image/png;base64," + "A" * (MAX_PICTURE_BYTES // 3 * 4 + 8)
    monkeypatch.setattr("gym_fed.serving.pictures.decoding.base64.b64decode", None)
    with pytest.raises(GymError, match="bytes") as caught:
        read_picture(text)
    assert caught.value.code is ErrorCode.TOO_LARGE


def test_a_request_has_few_pictures_of_few_pixels() -> None:
    require_limits(MAX_PICTURES, MAX_REQUEST_PIXELS)
    for count, pixels in ((MAX_PICTURES + 1, 1), (1, MAX_REQUEST_PIXELS + 1)):
        with pytest.raises(GymError) as caught:
            require_limits(count, pixels)
        assert caught.value.code is ErrorCode.TOO_LARGE


def test_a_picture_that_breaks_off_is_refused_when_it_is_decoded() -> None:
    picture = read_picture(url_of(png(64, 64, zlib.compress(bytes(100)))))
    with pytest.raises(GymError, match="is broken") as caught:
        picture.decoded()
    assert caught.value.code is ErrorCode.USAGE


_SEEDS = [
    base64.b64decode(data_url(drawn(1, 12, 9), kind).partition(",")[2])
    for kind in ("png", "jpeg", "webp", "gif")
]


@settings(max_examples=150)
@given(st.sampled_from(_SEEDS), st.integers(0, 400), st.binary(min_size=1, max_size=8), st.integers(0, 400))
def test_damaged_files_are_read_or_refused(data: bytes, at: int, put: bytes, cut: int) -> None:
    damaged = (data[:at] + put + data[at + len(put) :])[: max(4, len(data) - cut)]
    refused = None
    try:
        picture = read_picture(url_of(damaged, "image/jpeg"))
        mode = picture.decoded().mode
    except GymError as error:
        refused, mode = error.code, "RGB"
    assert mode == "RGB"
    assert refused in (None, ErrorCode.USAGE, ErrorCode.TOO_LARGE)


def test_the_digest_distinguishes_pictures_and_their_details() -> None:
    url, other = data_url(drawn(1)), data_url(drawn(2))
    found = {
        read_picture(url).digest,
        read_picture(url, "low").digest,
        read_picture(other).digest,
        read_picture(url, "auto").digest,
    }
    assert len(found) == 3
