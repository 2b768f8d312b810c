"""Read WebDataset shards: tar files whose members with one name and several suffixes are one row.

Nothing is extracted to disk, and rows do not contain member names, so a hostile path has no effect. A sample is read
completely, up to ``MAX_ROW_BYTES``.
"""

from __future__ import annotations

import io
import json
import re
import tarfile
from collections.abc import Collection, Iterator
from pathlib import PurePosixPath
from typing import Any, BinaryIO

from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.core.text import counted, plain
from gym_fed.data.bounded import MAX_ROW_BYTES, not_utf8, too_long

_MAX_HEADER_BYTES = 1 << 20
_MAX_MEMBERS = 1024
"""Maximum number of members of a sample."""
_MAX_GLOBAL_HEADERS = 64
_NAME = re.compile(r"((?:.*/)?[^./][^./]*)\.([^/]+)", re.DOTALL)
_SHOWN_CHARACTERS = 80
_MEDIA = {
    "images": ("jpg", "jpeg", "png", "webp", "bmp", "gif", "tif", "tiff", "ppm"),
    "videos": ("mp4", "avi", "mov", "mkv", "webm"),
    "audios": ("wav", "mp3", "flac", "ogg", "opus", "m4a"),
}
_CAPTIONS = ("txt", "text", "caption", "cap")
_ROW_KEYS = ("messages", "conversations", "conversation", "prompt", "instruction", "query", "chosen", "text")
"""Keys that make a ``.json`` member a row; without any of them, it describes the captioned image."""

Fields = dict[str, tuple[str, bytes]]
"""The names and contents of a sample's members, by suffix."""


def read_shard(name: str, stream: BinaryIO) -> Iterator[tuple[str, Any]]:
    """Yield the rows of a shard with their places.

    Args:
        name: The shard's name in messages.
        stream: The archive, decompressed; seekable.

    Raises:
        GymError: ``DATA_INVALID`` for damaged archives, members that are not files, and samples that are too large or
            no rows.
    """
    key, fields, size = "", Fields(), 0
    finished: set[int] = set()  # hashes instead of names, since a shard may have a million samples
    for member, suffix, path, data in _members(name, stream):
        if member != key and fields:
            yield f"{name}: {_shown(key)}", _row(name, key, fields)
            finished.add(hash(key))
            fields, size = {}, 0
        key = member
        if hash(key) in finished:
            raise _refused(
                name,
                path,
                "is not next to the other members of its sample",
                "write the archive with tar --sort=name",
            )
        if suffix in fields:
            raise _refused(name, path, "is in the archive twice", "use a different name for each sample")
        fields[suffix] = (path, data)
        size += len(data)
        if size > MAX_ROW_BYTES:
            raise too_long(f"{name}: {_shown(key)}", "shrink or drop the sample")
        if len(fields) > _MAX_MEMBERS:
            raise _refused(name, key, f"has more than {_MAX_MEMBERS} members", "split or drop the sample")
    if fields:
        yield f"{name}: {_shown(key)}", _row(name, key, fields)


def _members(name: str, stream: BinaryIO) -> Iterator[tuple[str, str, str, bytes]]:
    """Yield the sample, the suffix, the name and the contents of each file."""
    try:
        headers = _HeaderReader(name, stream)
        archive = tarfile.open(fileobj=headers, mode="r:", errorlevel=2)  # noqa: SIM115
        before = -1
        while (member := archive.next()) is not None:
            headers.count = 0
            vars(archive)["members"].clear()  # tarfile keeps every member that it has read
            if len(archive.pax_headers) > _MAX_GLOBAL_HEADERS:
                raise _refused(name, member.name, "follows too many global headers", "recreate the archive")
            if archive.offset <= before:
                raise _refused(name, member.name, "overlaps the preceding member", "recreate the archive")
            before = archive.offset
            if member.isdir() or PurePosixPath(member.name).name.startswith("."):
                continue
            match = _NAME.fullmatch(member.name)
            if not member.isreg() or member.issparse():
                raise _refused(
                    name,
                    member.name,
                    "is not a regular file",
                    "a shard may contain only files, no links or devices",
                )
            if match is None:
                raise _refused(name, member.name, "has no suffix", "name members SAMPLE.SUFFIX")
            if member.size > MAX_ROW_BYTES:
                raise too_long(f"{name}: {_shown(member.name)}", "shrink or drop the sample")
            stream.seek(member.offset_data)
            data = stream.read(member.size)
            if len(data) < member.size:
                raise _refused(name, member.name, "is truncated", "download or recreate the archive")
            stream.read(-member.size % tarfile.BLOCKSIZE)  # so that tarfile does not have to seek back
            yield match[1], match[2].lower(), member.name, data
    except (tarfile.TarError, ValueError, OverflowError, RecursionError) as error:
        raise GymError(
            ErrorCode.DATA_INVALID, f"{name}: not a readable tar archive: {error}", "recreate the archive"
        ) from error


class _HeaderReader(io.RawIOBase):
    """Limits what ``tarfile`` reads, since extended headers and maps of sparse files may have any size.

    Attributes:
        count: Number of bytes read since the last member.
    """

    def __init__(self, name: str, stream: BinaryIO) -> None:
        self._name, self._stream, self.count = name, stream, 0

    def read(self, size: int = -1) -> bytes:
        self.count += size
        if size < 0 or self.count > _MAX_HEADER_BYTES:
            raise GymError(
                ErrorCode.DATA_INVALID,
                f"{self._name}: a header of more than {counted(_MAX_HEADER_BYTES, 'byte')}",
                "recreate the archive",
            )
        return self._stream.read(size)

    def seek(self, offset: int, whence: int = 0) -> int:
        return self._stream.seek(offset, whence)

    def tell(self) -> int:
        return self._stream.tell()


def _row(name: str, key: str, fields: Fields) -> dict[str, Any]:
    """Return the raw row of a sample: its ``.json`` with its images, or its images and their caption."""
    row = _json(name, key, fields)
    media: dict[str, dict[str, bytes]] = {}
    for suffix, (path, data) in fields.items():
        kind = next((kind for kind, known in _MEDIA.items() if suffix.rpartition(".")[2] in known), None)
        if kind is not None and not data:
            raise _refused(name, path, "is empty", "correct or drop the sample")
        if kind is not None:
            media.setdefault(kind, {})[suffix] = data
    images = _in_order(name, key, row, fields, media.get("images", {}))
    caption = next((suffix for suffix in _CAPTIONS if suffix in fields), None)
    read = {"json", *images, *media.get("videos", ()), *media.get("audios", ())}
    if caption is not None and images and not any(column in row for column in _ROW_KEYS):
        question = {"role": "user", "content": "<image>" * len(images)}
        answer = {"role": "assistant", "content": _text(name, *fields[caption]).strip()}
        row = {**row, "messages": [question, answer]}
        read.add(caption)
    columns = {kind: [{"bytes": data} for data in files.values()] for kind, files in media.items()}
    if images:
        columns["images"] = [{"bytes": media["images"][suffix]} for suffix in images]
    return {**row, **columns, **{f".{suffix}": True for suffix in fields if suffix not in read}}


def _json(name: str, key: str, fields: Fields) -> dict[str, Any]:
    if "json" not in fields:
        return {}
    try:
        row = json.loads(_text(name, *fields["json"]))
    except (ValueError, RecursionError) as error:
        raise _refused(
            name, fields["json"][0], f"is not valid JSON: {error}", "correct or drop the sample"
        ) from error
    if not isinstance(row, dict):
        raise _refused(name, fields["json"][0], "is not a JSON object", "write the row as { ... }")
    return row


def _in_order(name: str, key: str, row: dict[str, Any], fields: Fields, images: Collection[str]) -> list[str]:
    """Return the suffixes of the images in the order of the row's ``images``, which is removed from the row."""
    given = row.pop("images", None) or row.pop("image", None)
    row.pop("image", None)
    if not given:
        return list(images)
    by_name = {PurePosixPath(fields[suffix][0]).name: suffix for suffix in images}
    names = [PurePosixPath(str(image)).name for image in (given if isinstance(given, list) else [given])]
    if missing := [image for image in names if image not in by_name]:
        raise _refused(
            name, key, f"refers to the image {_shown(missing[0])}, which is missing", "add it to the sample"
        )
    return [by_name[image] for image in names]


def _text(name: str, path: str, data: bytes) -> str:
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise not_utf8(f"{name}: {_shown(path)}: not UTF-8 at byte {error.start}") from error


def _shown(path: str) -> str:
    return plain(path, _SHOWN_CHARACTERS)


def _refused(name: str, path: str, problem: str, remedy: str) -> GymError:
    return GymError(ErrorCode.DATA_INVALID, f"{name}: {_shown(path)} {problem}", remedy)
