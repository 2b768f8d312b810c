"""Write a ``.gymdelta``: the same bytes for the same entries, whole or not at all."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch
from gym_quant import CodecError, Params, Payload, get_codec
from torch import Tensor

from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.core.files import atomic_file
from gym_fed.delta.base import BaseSpec
from gym_fed.delta.layout import Field, Layout, header_bytes
from gym_fed.delta.manifest import Manifest, TensorRecord

_CHUNK = 1 << 20


@dataclass(frozen=True)
class DeltaInfo:
    """Name and size of a written file: lower-case hex sha256 of its bytes, and how many there are."""

    sha256: str
    size_bytes: int


@dataclass(frozen=True)
class DeltaEntry:
    """One tensor to write. ``payload`` is called when its turn comes, so that one is held at a time."""

    name: str
    shape: tuple[int, ...]
    codec: str
    params: Params
    payload: Callable[[], Payload]

    @classmethod
    def of(cls, name: str, delta: Tensor, codec: str = "bitdelta", **params: Any) -> DeltaEntry:
        """Encode a delta now.

        Raises:
            GymError: ``DELTA_INVALID`` naming the tensor, for what the codec refuses.
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
    path: str | Path, entries: Iterable[DeltaEntry], spec: BaseSpec, extra: Mapping[str, str] | None = None
) -> DeltaInfo:
    """Write entries, in any order, as a delta of ``spec``.

    Raises:
        GymError: ``DELTA_INVALID`` naming the tensor that the base does not have in that shape, that is
            listed twice, or whose payload is not what its codec says.
    """
    listed = list(entries)
    by_name = {entry.name: entry for entry in listed}
    for entry in listed:
        if spec.shapes.get(entry.name) != entry.shape:
            raise _invalid(
                entry.name, f"shape {list(entry.shape)} is not the base's ({spec.shapes.get(entry.name)})"
            )
    manifest = Manifest.of(spec.model_name, spec.digest, [entry.record for entry in listed], extra)
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
    digest = hashlib.sha256()
    file.seek(0)
    while chunk := file.read(_CHUNK):
        digest.update(chunk)
    return digest.hexdigest()


def _invalid(name: str, message: str) -> GymError:
    return GymError(ErrorCode.DELTA_INVALID, f"tensor {name!r}: {message}")
