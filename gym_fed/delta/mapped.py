"""Map a ``.gymdelta`` into memory within limits, and parse its header."""

from __future__ import annotations

import mmap
import os
import stat
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.core.portable import O_BINARY, O_NONBLOCK, read_at
from gym_fed.core.text import counted
from gym_fed.delta.manifest import strict_json
from gym_fed.delta.writer import ALIGNMENT


@dataclass(frozen=True)
class DeltaLimits:
    """Limits that are checked before anything is read or allocated.

    Attributes:
        max_header_bytes: Maximum size of the safetensors header.
        max_tensors: Maximum tensors in the manifest; with a base, also at most the base's number.
        max_file_bytes: Maximum size of the file.
        sums: False refuses codecs that add up (``Codec.adds_up``), whose payloads inflate to many times their bytes.
    """

    max_header_bytes: int = 8 << 20
    max_tensors: int = 65_536
    max_file_bytes: int = 1 << 40
    sums: bool = True


def map_file(path: Path, limits: DeltaLimits) -> tuple[mmap.mmap, dict[str, Any]]:
    """Map the file (private, copy-on-write, since torch needs a writable buffer) and parse its header."""
    try:
        handle = os.open(path, os.O_RDONLY | O_BINARY | O_NONBLOCK)
    except (FileNotFoundError, NotADirectoryError):
        raise GymError(ErrorCode.FILE_NOT_FOUND, "no such file", "pass a .gymdelta file") from None
    try:
        status = os.fstat(handle)
        size = status.st_size
        if not stat.S_ISREG(status.st_mode):
            raise _invalid("is not a regular file")
        if size > limits.max_file_bytes:
            raise _invalid(f"is {counted(size, 'byte')} long, over the limit of {limits.max_file_bytes}")
        length = int.from_bytes(read_at(handle, 8, 0), "little")
        if size < 8 or length > size - 8:
            raise _invalid(
                f"is truncated: {counted(size, 'byte')}, but its header alone ends at {8 + length}"
            )
        header_size = f"has a header of {counted(length, 'byte')}"
        if length > limits.max_header_bytes:
            raise _invalid(f"{header_size}, over the limit of {limits.max_header_bytes}")
        if length % ALIGNMENT:
            raise _invalid(f"{header_size}, not a multiple of {ALIGNMENT}")
        try:
            text = read_at(handle, length, 8).decode("utf-8")
        except UnicodeDecodeError as error:
            raise _invalid(f"has a header that is not UTF-8 at byte {8 + error.start}") from error
        header = strict_json(text, "header")
        return mmap.mmap(handle, size, access=mmap.ACCESS_COPY), header
    finally:
        os.close(handle)


def unmap(view: mmap.mmap) -> None:
    """Close a map; if a payload view is still alive, the map is closed with the last of them."""
    with suppress(BufferError):
        view.close()


def _invalid(message: str) -> GymError:
    return GymError(ErrorCode.DELTA_INVALID, message)
