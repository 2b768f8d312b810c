"""Store packed base weights in a safetensors file that is read into huge pages and used in place.

    write_packed("base.safetensors", {"model.layers.0.mlp.up": packed, "model.norm.weight": norm}, {"base": digest})
    file = open_packed("base.safetensors")
    file.tensors["model.layers.0.mlp.up"].multiply(x, y)

The tensors of a packed layer are named by the layer, a dot and the field. The metadata's entry ``linears`` lists the
packed layers: format, rows, columns, fields; the entry ``sha256`` contains every tensor's digest. The data begin at a
multiple of 64 bytes, largest elements first, without gaps, so that any safetensors reader can read the file.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import stat
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from gym_quant.errors import CodecError
from gym_quant.huge_pages import empty, in_huge_pages
from gym_quant.linear import PackedLinear, get_linear, linear_formats

MAX_HEADER_BYTES = 16 << 20
"""Maximum size in bytes of a header, checked before it is read."""
MAX_TENSORS = 65_536
"""Maximum number of tensors."""

_LINEARS, _DIGESTS = "linears", "sha256"
_ALIGNMENT = 64
_MAX_DIMENSIONS = 8
_DTYPES = {
    "I64": torch.int64,
    "F32": torch.float32,
    "I32": torch.int32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I8": torch.int8,
    "U8": torch.uint8,
}
_LABELS = {dtype: label for label, dtype in _DTYPES.items()}


@dataclass(frozen=True)
class PackedFile:
    """The contents of a file. The tensors are views of one buffer, which lives as long as any of them.

    Attributes:
        tensors: Packed layers, and plain tensors, by name.
        metadata: The writer's texts.
    """

    tensors: dict[str, PackedLinear | Tensor]
    metadata: dict[str, str]


@dataclass(frozen=True)
class _HeaderEntry:
    """One tensor in the header."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    stop: int


def write_packed(
    path: str | Path, tensors: Mapping[str, PackedLinear | Tensor], metadata: Mapping[str, str] | None = None
) -> None:
    """Write packed layers and plain tensors atomically.

    Args:
        path: The file.
        tensors: Packed layers and tensors by name; no name may be that of a packed layer's field.
        metadata: Texts to store; the names ``linears`` and ``sha256`` are reserved.

    Raises:
        CodecError: For names, texts or dtypes that the file cannot store, before anything is written.
    """
    flat, linears = _flattened(tensors)
    for key, text in (metadata or {}).items():
        if key in (_LINEARS, _DIGESTS) or not isinstance(key, str) or not isinstance(text, str):
            raise CodecError(
                f"metadata {key!r} must be text, and its key must not be {_LINEARS!r} or {_DIGESTS!r}"
            )
    # Tiles first, since their sizes are multiples of 64 bytes, then the widest dtypes, so that all are aligned.
    fields = {f"{name}.{field}" for name, entry in linears.items() for field in entry["fields"]}
    names = sorted(
        flat, key=lambda n: (n not in fields or flat[n].nbytes % _ALIGNMENT != 0, -flat[n].itemsize, n)
    )
    own = {_LINEARS: linears, _DIGESTS: _digests(flat)}
    texts = {key: json.dumps(value, sort_keys=True) for key, value in own.items()}
    header: dict[str, Any] = {"__metadata__": {**(metadata or {}), **texts}}
    at = 0
    for name in names:
        tensor = flat[name]
        header[name] = {
            "dtype": _LABELS[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [at, at + tensor.nbytes],
        }
        at += tensor.nbytes
    packed = json.dumps(header, separators=(",", ":")).encode()
    packed += b" " * (-(8 + len(packed)) % _ALIGNMENT)
    if len(packed) > MAX_HEADER_BYTES or len(flat) > MAX_TENSORS:
        raise CodecError(
            f"{len(flat)} tensors and a header of {len(packed)} bytes exceed the limits of a file"
        )
    target = Path(path)
    part = target.with_name(f"{target.name}.{os.getpid()}.part")
    try:
        with part.open("wb") as file:
            file.write(len(packed).to_bytes(8, "little") + packed)
            for name in names:
                _write(file, flat[name])
            file.flush()
            os.fsync(file.fileno())
        part.replace(target)
    finally:
        part.unlink(missing_ok=True)


def open_packed(path: str | Path, require: Callable[[os.stat_result], None] | None = None) -> PackedFile:
    """Read a file and check header, sizes, dtypes, tensor digests and scales.

    The file is not memory-mapped: huge pages make products of one row up to 10% faster, and what was checked cannot
    change afterwards.

    Args:
        path: File of ``write_packed``.
        require: Called with the opened file's status; raises an error if the file must not be read.

    Raises:
        CodecError: For an invalid file, with the tensor's name.
        OSError: If the file cannot be read.
    """
    file = Path(path)
    try:
        text, contents = _read(file, require)
        entries, metadata = _header(text, len(contents))
        data = {name: _tensor(contents, entry) for name, entry in entries.items()}
        assembled = _assembled(dict(data), metadata)
        _require_digests(data, metadata)  # last, so that more specific errors are reported first
        return PackedFile(assembled, metadata)
    except CodecError as error:
        raise CodecError(f"{file}: {error}") from error


def _flattened(
    tensors: Mapping[str, PackedLinear | Tensor],
) -> tuple[dict[str, Tensor], dict[str, dict[str, Any]]]:
    """Return all tensors by their names in the file, and the table of packed layers."""
    flat: dict[str, Tensor] = {}
    linears: dict[str, dict[str, Any]] = {}
    for name, value in tensors.items():
        if not isinstance(name, str) or not name or name == "__metadata__":
            raise CodecError(f"{name!r} is not a valid tensor name")
        if isinstance(value, Tensor):
            parts = {name: value}
        else:
            fields = value.tensors()
            parts = {f"{name}.{field}": tensor for field, tensor in fields.items()}
            linears[name] = {
                "format": value.format,
                "rows": value.rows,
                "cols": value.cols,
                "fields": sorted(fields),
            }
        for key, tensor in parts.items():
            if key in flat:
                raise CodecError(f"tensor {key!r} would be stored twice")
            if tensor.dtype not in _LABELS or tensor.ndim > _MAX_DIMENSIONS:
                raise CodecError(
                    f"tensor {key!r} is {list(tensor.shape)} {tensor.dtype}, which a file cannot store"
                )
            flat[key] = tensor.detach().cpu().contiguous()
    return flat, linears


def _bytes(tensor: Tensor) -> Any:
    """Return a tensor's bytes as a view; torch cannot view empty tensors."""
    return tensor.reshape(-1).view(torch.uint8).numpy().data if tensor.numel() else b""


def _write(file: BinaryIO, tensor: Tensor) -> None:
    file.write(_bytes(tensor))


def _digests(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """Hash the tensors' bytes in threads; hashing releases the GIL."""
    with ThreadPoolExecutor(torch.get_num_threads()) as threads:
        digests = threads.map(lambda tensor: hashlib.sha256(_bytes(tensor)).hexdigest(), tensors.values())
        return dict(zip(tensors, digests, strict=True))


def _require_digests(data: dict[str, Tensor], metadata: dict[str, str]) -> None:
    """Check every tensor's digest. Removes the digests from ``metadata``."""
    if _DIGESTS not in metadata:
        raise CodecError(f"is not a file of packed weights: its metadata have no {_DIGESTS!r}")
    expected = _json(metadata.pop(_DIGESTS).encode(), f"table of {_DIGESTS!r}")
    if expected.keys() != data.keys():
        raise CodecError(f"its table of {_DIGESTS!r} does not list exactly its tensors")
    for name, digest in _digests(data).items():
        if digest != expected[name]:
            raise CodecError(f"tensor {name!r}: its bytes have changed since they were written")


def _read(path: Path, require: Callable[[os.stat_result], None] | None) -> tuple[bytes, Tensor]:
    """Return the header, and the data as uint8."""
    handle = os.open(path, os.O_RDONLY | getattr(os, "O_BINARY", 0) | getattr(os, "O_NONBLOCK", 0))
    with os.fdopen(handle, "rb") as file:
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode):
            raise CodecError("is not a regular file")
        if require is not None:
            require(status)
        length = int.from_bytes(file.read(8), "little")
        if length > MAX_HEADER_BYTES:
            raise CodecError(f"has a header of {length} bytes, over the limit of {MAX_HEADER_BYTES}")
        if 8 + length > status.st_size:
            raise CodecError(
                f"is truncated: {status.st_size} bytes, but its header alone ends at {8 + length}"
            )
        if (8 + length) % _ALIGNMENT:
            raise CodecError(f"has data from byte {8 + length} on, not a multiple of {_ALIGNMENT}")
        text = file.read(length)
        with in_huge_pages():
            contents = empty([status.st_size - 8 - length], torch.uint8)
        if (size := file.readinto(contents.numpy().data)) != len(contents):
            raise CodecError(f"became shorter while it was read: {size} bytes of data, not {len(contents)}")
        return text, contents


def _header(text: bytes, size: int) -> tuple[dict[str, _HeaderEntry], dict[str, str]]:
    """Parse the header's entries, in byte order without gaps or overlaps, and the metadata."""
    header = _json(text, "header")
    metadata = header.pop("__metadata__", None)
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise CodecError("its metadata are not strings")
    if len(header) > MAX_TENSORS:
        raise CodecError(f"has {len(header)} tensors, over the limit of {MAX_TENSORS}")
    entries = {name: _entry(name, value) for name, value in header.items()}
    at = 0
    for name, entry in sorted(entries.items(), key=lambda item: (item[1].start, item[1].stop)):
        if entry.start != at:
            raise CodecError(f"tensor {name!r} begins at byte {entry.start} of the data, not at {at}")
        if entry.start % entry.dtype.itemsize:
            raise CodecError(f"tensor {name!r} begins at byte {entry.start}, not a multiple of its element")
        at = entry.stop
    if at != size:
        raise CodecError(f"has {size} bytes of data, not the {at} of its tensors")
    return entries, metadata


def _entry(name: str, value: object) -> _HeaderEntry:
    if not isinstance(value, dict) or set(value) != {"dtype", "shape", "data_offsets"}:
        raise CodecError(f"tensor {name!r} must have exactly dtype, shape and data_offsets")
    label, shape, offsets = value["dtype"], value["shape"], value["data_offsets"]
    if not isinstance(label, str) or label not in _DTYPES:
        raise CodecError(f"tensor {name!r} has dtype {label!r}, not one of {', '.join(_DTYPES)}")
    if not _are_sizes(shape) or len(shape) > _MAX_DIMENSIONS:
        raise CodecError(f"tensor {name!r} needs a shape of up to {_MAX_DIMENSIONS} sizes")
    if not _are_sizes(offsets) or len(offsets) != 2:
        raise CodecError(f"tensor {name!r} needs two data_offsets")
    dtype = _DTYPES[label]
    if offsets[1] - offsets[0] != math.prod(shape) * dtype.itemsize:
        raise CodecError(f"tensor {name!r} has {offsets[1] - offsets[0]} bytes, not those of {shape} {label}")
    return _HeaderEntry(dtype, tuple(shape), offsets[0], offsets[1])


def _are_sizes(value: object) -> bool:
    return isinstance(value, list) and all(type(size) is int and 0 <= size < 1 << 62 for size in value)


def _tensor(contents: Tensor, entry: _HeaderEntry) -> Tensor:
    """Return a view; torch cannot view empty tensors."""
    if entry.start == entry.stop:
        return torch.empty(entry.shape, dtype=entry.dtype)
    return contents[entry.start : entry.stop].view(entry.dtype).reshape(entry.shape)


def _assembled(data: dict[str, Tensor], metadata: dict[str, str]) -> dict[str, PackedLinear | Tensor]:
    """Rebuild packed layers from their fields; the remaining tensors are plain. Removes the table from ``metadata``."""
    if _LINEARS not in metadata:
        raise CodecError(f"is not a file of packed weights: its metadata have no {_LINEARS!r}")
    assembled: dict[str, PackedLinear | Tensor] = {}
    for name, entry in _json(metadata.pop(_LINEARS).encode(), f"table of {_LINEARS!r}").items():
        try:
            assembled[name] = _linear(name, entry, data)
        except CodecError as error:
            raise CodecError(f"tensor {name!r}: {error}") from error
    if both := assembled.keys() & data.keys():
        raise CodecError(f"tensor {min(both)!r} is both packed and plain")
    return assembled | data


def _linear(name: str, entry: object, data: dict[str, Tensor]) -> PackedLinear:
    if not isinstance(entry, dict) or set(entry) != {"format", "rows", "cols", "fields"}:
        raise CodecError("must have exactly format, rows, cols and fields")
    format, fields = entry["format"], entry["fields"]
    if not isinstance(format, str) or format not in linear_formats():
        raise CodecError(f"has format {format!r}, not one of {', '.join(linear_formats())}")
    if not _are_sizes([entry["rows"], entry["cols"]]):
        raise CodecError(f"has rows {entry['rows']!r} and cols {entry['cols']!r}, which are not sizes")
    if not isinstance(fields, list) or not all(isinstance(field, str) for field in fields):
        raise CodecError("has fields that are not names")
    tensors = {}
    for field in fields:
        if f"{name}.{field}" not in data:
            raise CodecError(f"has no separate tensor {field!r} in the file")
        tensors[field] = data.pop(f"{name}.{field}")
    return get_linear(format).of(tensors, entry["rows"], entry["cols"])


def _json(text: bytes, what: str) -> dict[str, Any]:
    """Parse an object without duplicate names."""

    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        made = dict(pairs)
        if len(made) != len(pairs):
            raise CodecError(f"its {what} has a duplicate name")
        return made

    try:
        value = json.loads(text.decode("utf-8"), object_pairs_hook=once)
    except CodecError:
        raise
    except (ValueError, RecursionError) as error:  # also for a number of 5,000 digits
        raise CodecError(f"its {what} is not JSON in UTF-8: {error}") from error
    if not isinstance(value, dict):
        raise CodecError(f"its {what} is not an object")
    return value
