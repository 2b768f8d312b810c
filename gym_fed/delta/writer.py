"""Write a ``.gymdelta`` atomically; equal entries give equal bytes.

The layout is one safetensors tensor per dtype, filled in order of name. All payload fields of one dtype are
concatenated in one section (``f32``, ``bf16``, ``u8``), so that the header lists three tensors instead of
thousands. Offsets follow from the manifest.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, BinaryIO

import torch
from gym_quant import CodecError, Params, Payload, get_codec
from torch import Tensor

from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.core.files import atomic_file, copy_hashed
from gym_fed.delta.added_tokens import AddedTokens, fits_base
from gym_fed.delta.base import BaseSpec
from gym_fed.delta.manifest import Manifest, TensorRecord

METADATA_KEY = "gymdelta"
ALIGNMENT = 8
SECTIONS: tuple[tuple[str, str, torch.dtype], ...] = (
    ("f32", "F32", torch.float32),
    ("f16", "F16", torch.float16),
    ("bf16", "BF16", torch.bfloat16),
    ("i8", "I8", torch.int8),
    ("u8", "U8", torch.uint8),
)
"""Section name, safetensors dtype, torch dtype; in file order, widest first, so that all are aligned."""


@dataclass(frozen=True)
class Field:
    """One payload field: dtype, shape, and byte offset in its section."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int

    @cached_property
    def size(self) -> int:
        return self.dtype.itemsize * math.prod(self.shape)


@dataclass(frozen=True)
class Layout:
    """The fields of every tensor, and the size in bytes of every section."""

    fields: dict[str, tuple[Field, ...]]
    sections: dict[torch.dtype, int]

    @classmethod
    def of(cls, records: Iterable[TensorRecord]) -> Layout:
        """Lay out records that are sorted by name and have known codecs and normalised parameters."""
        fields: dict[str, tuple[Field, ...]] = {}
        sections: dict[torch.dtype, int] = {}
        for record in records:
            tensor_fields: list[Field] = []
            spec = get_codec(record.codec).payload_spec(record.shape, record.params)
            for name, (dtype, shape) in spec.items():
                field = Field(name, dtype, shape, sections.get(dtype, 0))
                sections[dtype] = field.start + field.size
                tensor_fields.append(field)
            fields[record.name] = tuple(tensor_fields)
        return cls(fields, sections)

    def section_starts(self) -> dict[torch.dtype, int]:
        """Return the byte offset of every section, counted from the end of the header."""
        starts: dict[torch.dtype, int] = {}
        at = 0
        for _, _, dtype in SECTIONS:
            if dtype in self.sections:
                starts[dtype] = at
                at += self.sections[dtype]
        return starts

    @property
    def data_bytes(self) -> int:
        return sum(self.sections.values())


def header_bytes(manifest: Manifest, layout: Layout) -> bytes:
    """The safetensors header with its length prefix, padded with spaces to a multiple of eight bytes."""
    header: dict[str, object] = {"__metadata__": {METADATA_KEY: manifest.to_json()}}
    starts = layout.section_starts()
    for name, label, dtype in SECTIONS:
        if dtype in starts:
            size = layout.sections[dtype]
            offsets = [starts[dtype], starts[dtype] + size]
            header[name] = {"dtype": label, "shape": [size // dtype.itemsize], "data_offsets": offsets}
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode("utf-8")
    text += b" " * (-len(text) % ALIGNMENT)
    return len(text).to_bytes(8, "little") + text


@dataclass(frozen=True)
class DeltaInfo:
    """The hex sha256 and size of a written file."""

    sha256: str
    size_bytes: int


@dataclass(frozen=True)
class DeltaEntry:
    """One tensor to write. ``payload`` is called during the write, so that memory holds only one payload at a time."""

    name: str
    shape: tuple[int, ...]
    codec: str
    params: Params
    payload: Callable[[], Payload]

    @classmethod
    def of(cls, name: str, delta: Tensor, codec: str = "bitdelta", **params: Any) -> DeltaEntry:
        """Encode a delta immediately.

        Raises:
            GymError: ``DELTA_INVALID`` naming the tensor, if the codec refuses it.
        """
        try:
            encoded = get_codec(codec).encode(delta, **params)
        except CodecError as error:
            raise GymError(ErrorCode.DELTA_INVALID, f"tensor {name!r}: {error}") from error
        return cls(name, tuple(delta.shape), codec, encoded.params, lambda: encoded.payload)

    @property
    def record(self) -> TensorRecord:
        return TensorRecord(self.name, self.shape, self.codec, self.params)


def write_delta(
    path: str | Path,
    entries: Iterable[DeltaEntry],
    spec: BaseSpec,
    extra: Mapping[str, str] | None = None,
    vocabulary: AddedTokens | None = None,
) -> DeltaInfo:
    """Write entries, in any order, as a delta of ``spec``.

    ``vocabulary`` lists added tokens; their rows are entries too (``gym_fed.delta.added_tokens.rows_name``).

    Raises:
        GymError: ``DELTA_INVALID`` naming the tensor that the base does not have with that shape, that is
            listed twice, or whose payload does not match its codec.
    """
    listed = list(entries)
    by_name = {entry.name: entry for entry in listed}
    for entry in listed:
        if not fits_base(entry.name, entry.shape, spec.shapes):
            expected = spec.shapes.get(entry.name)
            raise _invalid(entry.name, f"shape {list(entry.shape)} is not the base's ({expected})")
    records = [entry.record for entry in listed]
    manifest = Manifest.of(spec.model_name, spec.digest, records, extra, vocabulary)
    layout = Layout.of(manifest.tensors)
    header = header_bytes(manifest, layout)
    starts = {dtype: len(header) + start for dtype, start in layout.section_starts().items()}
    with atomic_file(Path(path)) as file:
        file.write(header)
        for record in manifest.tensors:
            payload = by_name[record.name].payload()
            for field in layout.fields[record.name]:
                file.seek(starts[field.dtype] + field.start)
                file.write(_field_bytes(record.name, field, payload))
        return DeltaInfo(_sha256(file), len(header) + layout.data_bytes)


def _field_bytes(name: str, field: Field, payload: Payload) -> memoryview:
    tensor = payload.get(field.name)
    if tensor is None or tensor.dtype != field.dtype or tuple(tensor.shape) != field.shape:
        raise _invalid(name, f"payload {field.name!r} is not {field.dtype} {list(field.shape)}")
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().data


def _sha256(file: BinaryIO) -> str:
    file.seek(0)
    return copy_hashed(file)[0]


def _invalid(name: str, message: str) -> GymError:
    return GymError(ErrorCode.DELTA_INVALID, f"tensor {name!r}: {message}")
