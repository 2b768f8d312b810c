"""Decodes the pictures of a request, which are anybody's bytes: nothing is fetched, and everything is bounded first.

Bytes are bounded before base64 is read, pixels before anything is decompressed, and how long and narrow a picture may
be before it is resized: a strip of one pixel would become one of gigabytes. Formats are few, known by first bytes.
What of a file makes no pixels (``containers``) is not decoded.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import re
import struct
import zlib
from dataclasses import dataclass
from io import BytesIO
from typing import TYPE_CHECKING, Literal

from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.serving.pictures.containers import TooManyParts, pixels_alone

if TYPE_CHECKING:
    from PIL.Image import Image

MAX_PICTURES = 16
"""Of a request."""
MAX_PICTURE_BYTES = 6 * 2**20
MAX_PIXELS = 2**24
MAX_REQUEST_PIXELS = 2**26
"""Of all pictures of a request."""
MAX_RATIO = 50
"""Of the longer side to the shorter one."""

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
"""What undoes an orientation; 1 is upright."""
_FORMATS = ("PNG", "JPEG", "WEBP", "GIF")
_BROKEN = (OSError, SyntaxError, ValueError, EOFError, struct.error, zlib.error, OverflowError, TypeError)
"""What PIL raises for broken files."""
_DECODED = "send a PNG, JPEG, WebP or GIF as data:image/png;base64,..."


@dataclass(frozen=True, eq=False)
class Picture:
    """A picture whose header was read.

    Attributes:
        data: What of the file makes its pixels.
        width: In pixels.
        height: In pixels.
        detail: How closely it is read.
        digest: Of the file and detail.
        orientation: How its camera was held, as EXIF has it.
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
        """Its pixels in RGB, turned as its camera says; of several frames the first.

        Raises:
            GymError: ``USAGE`` for a broken file.
        """
        from PIL import Image

        try:
            with Image.open(BytesIO(self.data), formats=_FORMATS) as image:
                found = image.convert("RGB")
                if self.orientation == 1:
                    return found
                return found.transpose(getattr(Image.Transpose, _TURNS[self.orientation]))
        except (*_BROKEN, Image.DecompressionBombError) as error:
            raise _refused("is broken", "save it again, and send that") from error


def read_picture(url: str, detail: Detail = "auto") -> Picture:
    """A picture from its data URL; nothing is decompressed.

    Raises:
        GymError: ``USAGE`` for another URL or format, ``TOO_LARGE`` beyond a bound.
    """
    file = _bytes_of(url)
    try:
        data, orientation = pixels_alone(file)
    except TooManyParts as error:
        raise GymError(
            ErrorCode.TOO_LARGE, f"the picture has {error}", "save it again, and send that"
        ) from error
    width, height = _size_of(data)
    if width < 1 or height < 1:
        raise _refused("has no pixels", _DECODED)
    if width * height > MAX_PIXELS:
        raise _too_large(f"has {width:,} x {height:,} pixels; {MAX_PIXELS:,} are allowed")
    if max(width, height) > MAX_RATIO * min(width, height):
        raise _too_large(f"is {width:,} x {height:,} pixels; one side may be {MAX_RATIO} times the other")
    digest = hashlib.sha256(f"{detail}:".encode() + file).digest()
    return Picture(data, width, height, detail, digest, orientation)


def require_few(count: int, pixels: int) -> None:
    """Refuse more pictures, or more pixels, than a request may have.

    Args:
        count: Pictures so far.
        pixels: Of all of them.

    Raises:
        GymError: ``TOO_LARGE``.
    """
    if count > MAX_PICTURES:
        raise GymError(
            ErrorCode.TOO_LARGE,
            f"the request has {count} pictures or more; {MAX_PICTURES} are allowed",
            "send fewer at once",
        )
    if pixels > MAX_REQUEST_PIXELS:
        raise GymError(
            ErrorCode.TOO_LARGE,
            f"the request's pictures have {pixels:,} pixels or more; {MAX_REQUEST_PIXELS:,} are allowed",
            "make them smaller, or send fewer at once",
        )


def _bytes_of(url: str) -> bytes:
    found = _URL.match(url)
    if found is None:
        scheme = url[:40].partition(":")[0].lower()
        if scheme in ("http", "https"):
            raise _refused(
                "is named by a web address, and this server fetches nothing: it would fetch for anybody",
                f"fetch it, and {_DECODED}",
            )
        raise _refused("is no data URL", _DECODED)
    if found[1].lower() not in _KINDS:
        raise _refused(f"is of type {found[1]!r}", _DECODED)
    if (found[2] or "").lower() != ";base64":
        raise _refused("is not in base64", _DECODED)
    text = url[found.end() :]
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
    """Width and height by the header."""
    from PIL import Image

    if data[:4] == b"RIFF" and data[8:12] == b"WEBP":
        width, height = _size_of_webp(data)  # PIL makes room for its pixels when it is opened
        if width * height > MAX_PIXELS:
            return width, height
    try:
        with Image.open(BytesIO(data), formats=_FORMATS) as image:
            return image.size
    except Image.DecompressionBombError as error:
        raise _too_large(f"has far more than {MAX_PIXELS:,} pixels") from error
    except _BROKEN as error:
        raise _refused("is no PNG, JPEG, WebP or GIF, or is broken", _DECODED) from error


def _size_of_webp(data: bytes) -> tuple[int, int]:
    """Of the canvas; (0, 0) for what is no WebP that is known."""
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
    return GymError(ErrorCode.USAGE, f"the picture {why}", remedy)


def _too_large(why: str) -> GymError:
    return GymError(ErrorCode.TOO_LARGE, f"the picture {why}", "make it smaller")
