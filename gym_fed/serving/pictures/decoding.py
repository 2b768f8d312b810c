"""Decode the pictures of a request, which are untrusted; sizes are checked first, and nothing is fetched.

Bytes are limited before base64 is decoded, pixels before anything is decompressed, and the aspect ratio before
resizing, since a strip one pixel wide would grow to gigabytes. Only a few formats are accepted, recognised by their
first bytes. Parts of a file that do not affect the pixels are removed before decoding.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import re
import struct
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from io import BytesIO
from typing import TYPE_CHECKING, Literal

from gym_fed.core.errors import ErrorCode, GymError

if TYPE_CHECKING:
    from PIL.Image import Image


MAX_PICTURES = 16
"""Maximum number of pictures in a request."""
MAX_PICTURE_BYTES = 6 * 2**20
MAX_PIXELS = 2**24
MAX_REQUEST_PIXELS = 2**26
"""Maximum number of pixels in all pictures of a request together."""
MAX_RATIO = 50
"""Maximum ratio of the longer side to the shorter one."""

Detail = Literal["auto", "low", "high"]

_URL = re.compile(r"data:([^;,]{0,40})(;[^,]{0,80})?,", re.ASCII)
_KINDS = {
    "image/png": "PNG",
    "image/jpeg": "JPEG",
    "image/jpg": "JPEG",
    "image/webp": "WEBP",
    "image/gif": "GIF",
}
_TURNS = {
    2: "FLIP_LEFT_RIGHT",
    3: "ROTATE_180",
    4: "FLIP_TOP_BOTTOM",
    5: "TRANSPOSE",
    6: "ROTATE_270",
    7: "TRANSVERSE",
    8: "ROTATE_90",
}
"""The transposition that undoes an EXIF orientation; 1 is upright."""
_FORMATS = ("PNG", "JPEG", "WEBP", "GIF")
_BROKEN = (OSError, SyntaxError, ValueError, EOFError, struct.error, zlib.error, OverflowError, TypeError)
"""The exceptions that PIL raises for broken files."""
_DECODED = "send a PNG, JPEG, WebP or GIF as data:image/png;base64,..."


@dataclass(frozen=True, eq=False)
class Picture:
    """A picture whose header was read.

    Attributes:
        data: The parts of the file that affect its pixels.
        width: The width in pixels.
        height: The height in pixels.
        detail: The requested resolution.
        digest: The digest of the file and the detail.
        orientation: The EXIF orientation.
    """

    data: bytes
    width: int
    height: int
    detail: Detail
    digest: bytes
    orientation: int = 1

    @property
    def pixels(self) -> int:
        return self.width * self.height

    def decoded(self) -> Image:
        """Decode the first frame to upright RGB.

        Raises:
            GymError: ``USAGE`` for a broken file.
        """
        from PIL import Image

        try:
            with Image.open(BytesIO(self.data), formats=_FORMATS) as image:
                picture = image.convert("RGB")
                if self.orientation == 1:
                    return picture
                return picture.transpose(getattr(Image.Transpose, _TURNS[self.orientation]))
        except (*_BROKEN, Image.DecompressionBombError) as error:
            raise _refused("is broken", "re-encode it, and send the result") from error


def read_picture(url: str, detail: Detail = "auto") -> Picture:
    """Read the header of a picture in a data URL, without decompressing anything.

    Raises:
        GymError: ``USAGE`` for any other URL or format; ``TOO_LARGE`` above a limit.
    """
    file = _bytes_of(url)
    try:
        data, orientation = pixels_alone(file)
    except TooManyParts as error:
        raise GymError(
            ErrorCode.TOO_LARGE, f"the image has {error}", "re-encode it, and send the result"
        ) from error
    width, height = _size_of(data)
    if width < 1 or height < 1:
        raise _refused("has no pixels", _DECODED)
    if width * height > MAX_PIXELS:
        raise _too_large(f"has {width:,} x {height:,} pixels; at most {MAX_PIXELS:,} are allowed")
    if max(width, height) > MAX_RATIO * min(width, height):
        raise _too_large(
            f"is {width:,} x {height:,} pixels; one side may be at most {MAX_RATIO} times as long as the "
            "other"
        )
    digest = hashlib.sha256(f"{detail}:".encode() + file).digest()
    return Picture(data, width, height, detail, digest, orientation)


def require_limits(count: int, pixels: int) -> None:
    """Refuse more pictures, or more pixels, than a request may have.

    Raises:
        GymError: ``TOO_LARGE``.
    """
    if count > MAX_PICTURES:
        raise GymError(
            ErrorCode.TOO_LARGE,
            f"the request has {count} images or more; at most {MAX_PICTURES} are allowed",
            "send fewer at once",
        )
    if pixels > MAX_REQUEST_PIXELS:
        raise GymError(
            ErrorCode.TOO_LARGE,
            f"the request's images have {pixels:,} pixels or more; at most {MAX_REQUEST_PIXELS:,} are allowed",
            "make them smaller, or send fewer at once",
        )


def _bytes_of(url: str) -> bytes:
    match = _URL.match(url)
    if match is None:
        scheme = url[:40].partition(":")[0].lower()
        if scheme in ("http", "https"):
            raise _refused(
                "is a web URL, but this server does not download media", f"download it, and {_DECODED}"
            )
        raise _refused("is not a data URL", _DECODED)
    if match[1].lower() not in _KINDS:
        raise _refused(f"is of type {match[1]!r}", _DECODED)
    if (match[2] or "").lower() != ";base64":
        raise _refused("is not in base64", _DECODED)
    text = url[match.end() :]
    if len(text) > MAX_PICTURE_BYTES // 3 * 4 + 4:
        raise _too_large(f"has more than {MAX_PICTURE_BYTES:,} bytes")
    try:
        data = base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        raise _refused("has broken base64", _DECODED) from error
    if len(data) > MAX_PICTURE_BYTES:
        raise _too_large(f"has more than {MAX_PICTURE_BYTES:,} bytes")
    return data


def _size_of(data: bytes) -> tuple[int, int]:
    """Return width and height from the header."""
    from PIL import Image

    if data[:4] == b"RIFF" and data[8:12] == b"WEBP":
        width, height = _size_of_webp(data)  # PIL allocates the pixels of a WebP file when it opens it
        if width * height > MAX_PIXELS:
            return width, height
    try:
        with Image.open(BytesIO(data), formats=_FORMATS) as image:
            return image.size
    except Image.DecompressionBombError as error:
        raise _too_large(f"has far more than {MAX_PIXELS:,} pixels") from error
    except _BROKEN as error:
        raise _refused("is not a PNG, JPEG, WebP or GIF, or is broken", _DECODED) from error


def _size_of_webp(data: bytes) -> tuple[int, int]:
    """Return the size of a WebP's canvas; (0, 0) for an unknown kind."""
    kind, body = data[12:16], data[20:30]
    if len(body) < 10:
        return 0, 0
    if kind == b"VP8X":
        return int.from_bytes(body[4:7], "little") + 1, int.from_bytes(body[7:10], "little") + 1
    if kind == b"VP8L":
        bits = int.from_bytes(body[1:5], "little")
        return (bits & 0x3FFF) + 1, (bits >> 14 & 0x3FFF) + 1
    if kind == b"VP8 ":
        return int.from_bytes(body[6:8], "little") & 0x3FFF, int.from_bytes(body[8:10], "little") & 0x3FFF
    return 0, 0


def _refused(why: str, remedy: str) -> GymError:
    return GymError(ErrorCode.USAGE, f"the image {why}", remedy)


def _too_large(why: str) -> GymError:
    return GymError(ErrorCode.TOO_LARGE, f"the image {why}", "make it smaller")


MAX_PARTS = 16_384
"""Maximum number of segments or chunks in a file."""
MAX_BLOCKS = 65_536
"""Maximum number of blocks in a GIF; a block has at most 255 bytes."""
MAX_SCANS = 100
"""Maximum number of scans of a JPEG, since a scan of a few bytes may take as long to decode as the whole image."""

_ORIENTATION, _SHORT = 0x0112, 3
_MAX_ENTRIES = 512
_MARKER = re.compile(rb"\xff([^\x00\xff\xd0-\xd7])", re.DOTALL)
_SOI, _EOI, _SOS, _COMMENT, _EXIF = 0xD8, 0xD9, 0xDA, 0xFE, 0xE1
_OF_COLOURS = (0xE0, 0xEE)
"""The JFIF and Adobe segments, which define how the values of a JPEG map to colours."""
_PNG_SIGNATURE = b"\x89PNG\r\n\x1a\n"
_PNG_KEPT = (b"IHDR", b"PLTE", b"tRNS", b"IDAT", b"IEND")


class TooManyParts(ValueError):
    """Raised if a file has too many parts."""


def pixels_alone(data: bytes) -> tuple[bytes, int]:
    """Remove all parts except those for the pixels of the first frame; also return the EXIF orientation (1 to 8).

    A broken file is returned unchanged, for the decoder to refuse.

    Raises:
        TooManyParts: For too many scans, segments, chunks or blocks; the message says which.
    """
    for start, strip in _STRIPPERS.items():
        if data.startswith(start):
            return strip(data)
    return data, 1


def _jpeg(data: bytes) -> tuple[bytes, int]:
    parts, orientation, scans, at = [data[:2]], 1, 0, 2
    for _ in range(MAX_PARTS):
        marker = _MARKER.search(data, at)
        if marker is None or marker[1][0] == _EOI:
            return b"".join((*parts, b"" if marker is None else b"\xff\xd9")), orientation
        kind, start = marker[1][0], marker.start(1) - 1
        end = start + 2 + (0 if kind in (0x01, _SOI) else _number(data, start + 2, ">H"))
        if kind == _SOS:
            scans += 1
            after = _MARKER.search(data, end)
            end = len(data) if after is None else after.start()
        if scans > MAX_SCANS:
            raise TooManyParts(f"more than {MAX_SCANS} scans")
        if kind == _EXIF and orientation == 1:
            orientation = _orientation(data[start + 4 : end])
        if kind in _OF_COLOURS or not (0xE0 <= kind <= 0xEF or kind == _COMMENT):
            parts.append(data[start:end])
        at = end
    raise TooManyParts(f"more than {MAX_PARTS:,} segments")


def _png(data: bytes) -> tuple[bytes, int]:
    parts, orientation, at = [_PNG_SIGNATURE], 1, len(_PNG_SIGNATURE)
    for _ in range(MAX_PARTS):
        kind, end = data[at + 4 : at + 8], at + 12 + _number(data, at, ">I")
        if kind in _PNG_KEPT:
            parts.append(data[at:end])
        elif kind == b"eXIf":
            orientation = _orientation(data[at + 8 : end - 4])
        if kind in (b"IEND", b""):
            return b"".join(parts), orientation
        at = end
    raise TooManyParts(f"more than {MAX_PARTS:,} chunks")


def _webp(data: bytes) -> tuple[bytes, int]:
    """Return the file unchanged, since libwebp reads only the chunks of the first frame."""
    at = 12
    for _ in range(MAX_PARTS):
        if at >= len(data):
            return data, 1
        size = _number(data, at + 4, "<I")
        if data[at : at + 4] == b"EXIF":
            return data, _orientation(data[at + 8 : at + 8 + size])
        at += 8 + size + size % 2
    raise TooManyParts(f"more than {MAX_PARTS:,} chunks")


def _gif(data: bytes) -> tuple[bytes, int]:
    at = 13 + (_table(data[10]) if len(data) > 12 else 0)
    head, control, remaining = data[:at], b"", iter(range(MAX_BLOCKS))
    while data[at : at + 1] == b"!":
        end = _end_of_blocks(data, at + 2, remaining)
        if data[at + 1 : at + 2] == b"\xf9":
            control = data[at:end]
        at = end
    if data[at : at + 1] != b"," or len(data) < at + 10:
        return head, 1
    start = at + 10 + _table(data[at + 9]) + 1
    return b"".join((head, control, data[at : _end_of_blocks(data, start, remaining)], b";")), 1


def _table(flags: int) -> int:
    """Return the size in bytes of the colour table that follows."""
    return 3 << (flags % 8 + 1) if flags & 0x80 else 0


def _end_of_blocks(data: bytes, at: int, left: Iterator[int]) -> int:
    """Return the offset after a list of length-prefixed blocks, which ends with an empty block."""
    for _ in left:
        length = data[at] if at < len(data) else 0
        at += 1 + length
        if not length:
            return at
    raise TooManyParts(f"more than {MAX_BLOCKS:,} blocks")


def _orientation(exif: bytes) -> int:
    """Return the orientation in EXIF data; 1 if there is none."""
    exif = exif.removeprefix(b"Exif\0\0")
    order = {b"II": "<", b"MM": ">"}.get(exif[:2])
    if order is None:
        return 1
    at = _number(exif, 4, f"{order}I")
    for entry in range(min(_number(exif, at, f"{order}H"), _MAX_ENTRIES)):
        place = at + 2 + 12 * entry
        if _number(exif, place, f"{order}H") == _ORIENTATION:
            value = _number(exif, place + 8, f"{order}H")
            is_one = _number(exif, place + 2, f"{order}H") == _SHORT and 1 <= value <= 8
            return value if is_one else 1
    return 1


def _number(data: bytes, at: int, form: str) -> int:
    """Unpack a number; bytes beyond the end of the data count as 0."""
    size = struct.calcsize(form)
    number: int = struct.unpack(form, data[at : at + size].ljust(size, b"\0"))[0]
    return number


_STRIPPERS: dict[bytes, Callable[[bytes], tuple[bytes, int]]] = {
    b"\xff\xd8": _jpeg,
    _PNG_SIGNATURE: _png,
    b"RIFF": _webp,
    b"GIF8": _gif,
}
"""Functions that remove the parts not needed for the pixels, by the first bytes of a file."""
