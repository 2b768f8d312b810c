"""The parts of a picture's file: those that make its pixels are kept, and all others are left out unread.

PIL reads texts, profiles and EXIF data, too, and without bounds: a thousand EXIF entries may share the same megabyte,
and comments are joined piece by piece. So none of them reaches it. How a camera was held is read here.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Callable, Iterator

MAX_PARTS = 16_384
"""Segments or chunks of a file."""
MAX_BLOCKS = 65_536
"""Of at most 255 bytes, of a GIF."""
MAX_SCANS = 100
"""Of a JPEG: each goes over all of its pixels, and may have a few bytes."""

_ORIENTATION, _SHORT = 0x0112, 3
_MOST_ENTRIES = 512
_MARKER = re.compile(rb"\xff([^\x00\xff\xd0-\xd7])", re.DOTALL)
_SOI, _EOI, _SOS, _COMMENT, _EXIF = 0xD8, 0xD9, 0xDA, 0xFE, 0xE1
_OF_COLOURS = (0xE0, 0xEE)
"""JFIF and Adobe: how a JPEG's numbers are colours."""
_PNG_SIGNATURE = b"\x89PNG\r\n\x1a\n"
_PNG_KEPT = (b"IHDR", b"PLTE", b"tRNS", b"IDAT", b"IEND")


class TooManyParts(ValueError):
    """A file of more parts than are read."""


def pixels_alone(data: bytes) -> tuple[bytes, int]:
    """The file with what makes its pixels, of several frames the first, and EXIF's orientation (1 to 8).

    What is broken is left as it is, for the decoder to refuse.

    Raises:
        TooManyParts: It says of what.
    """
    for start, strip in _STRIPPERS.items():
        if data.startswith(start):
            return strip(data)
    return data, 1


def _jpeg(data: bytes) -> tuple[bytes, int]:
    kept, orientation, scans, at = [data[:2]], 1, 0, 2
    for _ in range(MAX_PARTS):
        found = _MARKER.search(data, at)
        if found is None or found[1][0] == _EOI:
            return b"".join((*kept, b"" if found is None else b"\xff\xd9")), orientation
        kind, start = found[1][0], found.start(1) - 1
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
            kept.append(data[start:end])
        at = end
    raise TooManyParts(f"more than {MAX_PARTS:,} segments")


def _png(data: bytes) -> tuple[bytes, int]:
    kept, orientation, at = [_PNG_SIGNATURE], 1, len(_PNG_SIGNATURE)
    for _ in range(MAX_PARTS):
        kind, end = data[at + 4 : at + 8], at + 12 + _number(data, at, ">I")
        if kind in _PNG_KEPT:
            kept.append(data[at:end])
        elif kind == b"eXIf":
            orientation = _orientation(data[at + 8 : end - 4])
        if kind in (b"IEND", b""):
            return b"".join(kept), orientation
        at = end
    raise TooManyParts(f"more than {MAX_PARTS:,} chunks")


def _webp(data: bytes) -> tuple[bytes, int]:
    """Unchanged: its library reads no other chunk than those of the first frame."""
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
    head, control, left = data[:at], b"", iter(range(MAX_BLOCKS))
    while data[at : at + 1] == b"!":
        end = _end_of_blocks(data, at + 2, left)
        if data[at + 1 : at + 2] == b"\xf9":
            control = data[at:end]
        at = end
    if data[at : at + 1] != b"," or len(data) < at + 10:
        return head, 1
    start = at + 10 + _table(data[at + 9]) + 1
    return b"".join((head, control, data[at : _end_of_blocks(data, start, left)], b";")), 1


def _table(flags: int) -> int:
    """Bytes of the colours that follow."""
    return 3 << (flags % 8 + 1) if flags & 0x80 else 0


def _end_of_blocks(data: bytes, at: int, left: Iterator[int]) -> int:
    """Where blocks end that begin with their lengths, the last of which is zero."""
    for _ in left:
        length = data[at] if at < len(data) else 0
        at += 1 + length
        if not length:
            return at
    raise TooManyParts(f"more than {MAX_BLOCKS:,} blocks")


def _orientation(exif: bytes) -> int:
    """Of EXIF data; 1 where they have none."""
    exif = exif.removeprefix(b"Exif\0\0")
    order = {b"II": "<", b"MM": ">"}.get(exif[:2])
    if order is None:
        return 1
    at = _number(exif, 4, f"{order}I")
    for entry in range(min(_number(exif, at, f"{order}H"), _MOST_ENTRIES)):
        place = at + 2 + 12 * entry
        if _number(exif, place, f"{order}H") == _ORIENTATION:
            value = _number(exif, place + 8, f"{order}H")
            is_one = _number(exif, place + 2, f"{order}H") == _SHORT and 1 <= value <= 8
            return value if is_one else 1
    return 1


def _number(data: bytes, at: int, form: str) -> int:
    """At that place; 0 beyond the end."""
    size = struct.calcsize(form)
    found: int = struct.unpack(form, data[at : at + size].ljust(size, b"\0"))[0]
    return found


_STRIPPERS: dict[bytes, Callable[[bytes], tuple[bytes, int]]] = {
    b"\xff\xd8": _jpeg,
    _PNG_SIGNATURE: _png,
    b"RIFF": _webp,
    b"GIF8": _gif,
}
"""By a file's first bytes."""
