"""The place of every byte of a ``.gymdelta``: one safetensors tensor per dtype, filled in order of name.

All payload fields of one dtype stand end to end in one section (``f32``, ``bf16``, ``u8``), so that the
header costs bytes for three tensors and not for thousands. Offsets follow from the manifest.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from gym_quant import get_codec

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
    """One payload field: its dtype and shape, and its first byte counted from its section's start."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int

    @property
    def size(self) -> int:
        return self.dtype.itemsize * math.prod(self.shape)


@dataclass(frozen=True)
class Layout:
    """Fields of every tensor, and the size in bytes of every section."""

    fields: dict[str, tuple[Field, ...]]
    sections: dict[torch.dtype, int]

    @classmethod
    def of(cls, records: Iterable[TensorRecord]) -> Layout:
        """Lay out records that are sorted by name, with codecs that exist and parameters in normal form."""
        fields: dict[str, tuple[Field, ...]] = {}
        sections: dict[torch.dtype, int] = {}
        for record in records:
            own: list[Field] = []
            for name, (dtype, shape) in (
                get_codec(record.codec).payload_spec(record.shape, record.params).items()
            ):
                field = Field(name, dtype, shape, sections.get(dtype, 0))
                sections[dtype] = field.start + field.size
                own.append(field)
            fields[record.name] = tuple(own)
        return cls(fields, sections)

    def section_starts(self) -> dict[torch.dtype, int]:
        """First byte of every section, counted from the end of the header."""
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
