"""Read a ``.gymdelta``, memory-mapped and fully validated before anything is decoded, and add it to a model."""

from __future__ import annotations

import hashlib
import math
import mmap
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import torch
from gym_quant import CodecError, Params, Payload, get_codec
from gym_quant.codec import Codec
from gym_quant.grid import Integers
from gym_quant.registry import CODECS
from torch import Tensor, nn

from gym_fed.base.modeling.vocabulary import require_vocabulary, set_last_rows
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.core.text import counted
from gym_fed.delta.added_tokens import (
    MAX_ROW_TENSORS,
    AddedRows,
    AddedTokens,
    fits_base,
    refuse_added,
    require_rows,
    rows_name,
    split_rows,
)
from gym_fed.delta.base import BaseSpec, Tensors, model_tensors
from gym_fed.delta.manifest import Manifest, TensorRecord
from gym_fed.delta.mapped import DeltaLimits, map_file, unmap
from gym_fed.delta.writer import METADATA_KEY, SECTIONS, Field, Layout

_CHUNK, _DROP_FROM = 1 << 20, 1 << 18


class DeltaFile:
    """An open, valid delta file. Use as a context manager, or ``close`` it.

    Tensors of the base that the file leaves out are zero deltas: they are not in ``names``.

    Attributes:
        vocabulary: The tokens that the fine-tune added.
        added_rows: The rows of added tokens, or of a larger vocabulary; they are not in ``names``. None without any.
    """

    def __init__(
        self, path: Path, view: mmap.mmap, manifest: Manifest, layout: Layout, spec: BaseSpec | None
    ) -> None:
        """Use ``open`` instead."""
        self.path = path
        self.manifest = manifest
        self._names = {r.name: None for r in manifest.tensors if split_rows(r.name) is None}
        self._map: mmap.mmap | None = view
        self._sections: dict[torch.dtype, Tensor] = {}
        self._layout = layout
        self._records = {record.name: record for record in manifest.tensors}
        self._starts = {d: len(view) - layout.data_bytes + at for d, at in layout.section_starts().items()}
        self.num_weights = sum(math.prod(r.shape) for r in manifest.tensors)
        self._num_parameters = spec.num_parameters if spec else self.num_weights
        self.vocabulary: AddedTokens = manifest.vocabulary
        self.added_rows = AddedRows.of({name: record.shape for name, record in self._records.items()})
        self.size_bytes = len(view)

    @classmethod
    def open(
        cls,
        path: str | Path,
        spec: BaseSpec | None = None,
        limits: DeltaLimits | None = None,
        any_version: bool = False,
        added_tokens: bool = False,
    ) -> DeltaFile:
        """Map and validate a file.

        Args:
            path: File, which must not change while it is open.
            spec: Base of the delta; without one, base and shapes are not checked.
            limits: Limits on header, tensors and file; by default those of ``DeltaLimits``.
            any_version: Also accept a delta of another version with the base's shapes.
            added_tokens: Also accept a delta with a larger vocabulary than the base's.

        Raises:
            GymError: ``FILE_NOT_FOUND``; ``BASE_MISMATCH`` if the base's digest differs, or for added tokens;
                ``DELTA_INVALID``, with the tensor's name, for all other errors.
        """
        file = Path(path)
        with _named_in_errors(file):
            return cls._open(file, spec, limits or DeltaLimits(), any_version, added_tokens)

    @classmethod
    def _open(
        cls, path: Path, spec: BaseSpec | None, limits: DeltaLimits, any_version: bool, added_tokens: bool
    ) -> DeltaFile:
        view, header = map_file(path, limits)
        try:
            text = _metadata(header)
            cap = limits.max_tensors
            if spec is not None:
                cap = min(cap, len(spec.shapes) + MAX_ROW_TENSORS)
            manifest = Manifest.parse(text, cap)
            if spec is not None:
                if sum(split_rows(record.name) is None for record in manifest.tensors) > len(spec.shapes):
                    raise _invalid("the file lists more tensors than allowed")
                _check_base(manifest, spec, any_version)
            _check_codecs(manifest, limits)
            manifest.require_canonical(text)
            layout = Layout.of(manifest.tensors)
            _check_sections(header, layout, data_bytes=len(view) - 8 - int.from_bytes(view[:8], "little"))
            delta = cls(path, view, manifest, layout, spec)
            require_rows(delta.vocabulary, delta.added_rows)
            if not added_tokens:
                refuse_added(delta.vocabulary, delta.added_rows)
            delta._check_values()
        except BaseException:
            unmap(view)
            raise
        return delta

    @property
    def names(self) -> tuple[str, ...]:
        """Sorted names of the tensors in the file."""
        return tuple(self._names)

    def __contains__(self, name: object) -> bool:
        """True if the file has this tensor of the base."""
        return name in self._names

    @property
    def bits_per_weight(self) -> float:
        """Bits of the whole file per weight of the base (without a base: of the file's tensors)."""
        return 8.0 * self.size_bytes / max(1, self._num_parameters)

    def record(self, name: str) -> TensorRecord:
        """Shape, codec and parameters of a tensor."""
        return self._records[name]

    def payload(self, name: str) -> Payload:
        """A tensor's payload as read-only views of the mapped file, valid until ``close``."""
        return {field.name: self._view(field) for field in self._layout.fields[name]}

    def payload_bytes(self, name: str) -> int:
        """Payload size of a tensor."""
        return sum(field.size for field in self._layout.fields[name])

    def _encoded(self, name: str) -> tuple[Codec, tuple[Payload, tuple[int, ...], Params]]:
        """Return a tensor's codec, and its payload, shape and parameters, the arguments of the codec's methods."""
        record = self._records[name]
        return get_codec(record.codec), (self.payload(name), record.shape, record.params)

    def decode(self, name: str) -> Tensor:
        """Decode a tensor's delta to float32 in its own shape, in new memory."""
        codec, encoded = self._encoded(name)
        return codec.decode(*encoded)

    def decode_added(self, name: str) -> Tensor:
        """Decode the rows of a parameter in ``added_rows``, ``[rows, ...]`` float32."""
        assert self.added_rows is not None  # the name is one of its
        return self.decode(rows_name(name, self.added_rows.first))

    def decode_rows(self, name: str, start: int, stop: int) -> Tensor:
        """Decode rows of the delta as ``[rows, cols]`` (``cols`` is its last dimension), float32."""
        codec, encoded = self._encoded(name)
        return codec.decode_rows(*encoded, start, stop)

    def decode_block(self, name: str, rows: slice, cols: slice) -> Tensor:
        """Decode some columns of some rows, float32; ``cols`` begins at a multiple of ``gym_quant.codec.ALIGNED``."""
        codec, encoded = self._encoded(name)
        return codec.decode_block(*encoded, rows, cols)

    def integers(self, name: str) -> Integers | None:
        """A tensor's delta as integers times a power of two if it is exactly that; else None."""
        codec, encoded = self._encoded(name)
        return codec.integers(*encoded)

    def tensor_norm(self, name: str) -> float:
        """L2 norm of a tensor's delta."""
        codec, encoded = self._encoded(name)
        norm = codec.norm(*encoded)
        self.release(name)
        return norm

    def norm(self) -> float:
        """L2 norm of the whole delta; for sign deltas computed only from the scales."""
        return math.sqrt(math.fsum(self.tensor_norm(name) ** 2 for name in self.names))

    def sha256(self) -> str:
        """The hex sha256 of the file."""
        digest = hashlib.sha256()
        view = self._open_map()
        for start in range(0, len(view), _CHUNK):
            digest.update(view[start : start + _CHUNK])
            self._drop(start, start + _CHUNK)
        return digest.hexdigest()

    def close(self) -> None:
        """Unmap the file. Live views from ``payload`` keep the memory, not the file."""
        if self._map is not None:
            view, self._map = self._map, None
            self._sections.clear()
            unmap(view)

    def __enter__(self) -> DeltaFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _open_map(self) -> mmap.mmap:
        if self._map is None:
            raise GymError(ErrorCode.USAGE, f"{self.path} is closed", "open it again")
        return self._map

    def _view(self, field: Field) -> Tensor:
        section = self._sections.get(field.dtype)
        if section is None:
            section = self._sections[field.dtype] = self._section(field.dtype)
        itemsize = field.dtype.itemsize
        return section.narrow(0, field.start // itemsize, field.size // itemsize).view(field.shape)

    def _section(self, dtype: torch.dtype) -> Tensor:
        """View a section through numpy, which keeps the map alive under a live view; torch alone does not."""
        raw = np.frombuffer(self._open_map(), np.uint8, self._layout.sections[dtype], self._starts[dtype])
        return torch.from_numpy(raw).view(dtype)

    def _check_values(self) -> None:
        for name, record in self._records.items():
            with _about(name):
                get_codec(record.codec).check(self.payload(name), record.shape, record.params)
            self.release(name)

    def release(self, name: str) -> None:
        """Release a tensor's pages after a scan, so that the file does not become resident."""
        for field in self._layout.fields[name]:
            start = self._starts[field.dtype] + field.start
            self._drop(start, start + field.size)

    def _drop(self, start: int, stop: int) -> None:
        """Release the whole pages between two offsets; they are read again when needed."""
        first = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE
        length = (min(stop, self.size_bytes) - first) // mmap.PAGESIZE * mmap.PAGESIZE
        if length >= _DROP_FROM and hasattr(mmap, "MADV_DONTNEED"):
            self._open_map().madvise(mmap.MADV_DONTNEED, first, length)


def _metadata(header: dict[str, Any]) -> str:
    metadata = header.get("__metadata__")
    if (
        not isinstance(metadata, dict)
        or set(metadata) != {METADATA_KEY}
        or not isinstance(metadata[METADATA_KEY], str)
    ):
        raise _invalid(f"is not a .gymdelta: its metadata is not a single string {METADATA_KEY!r}")
    return str(metadata[METADATA_KEY])


def _check_base(manifest: Manifest, spec: BaseSpec, any_version: bool) -> None:
    if manifest.base_digest != spec.digest and not any_version:
        raise GymError(
            ErrorCode.BASE_MISMATCH,
            f"was made for base {manifest.base_model!r} with digest {manifest.base_digest}, not for "
            f"{spec.model_name!r} with digest {spec.digest}",
            "use the base that the delta was made from",
        )
    for record in manifest.tensors:
        if fits_base(record.name, record.shape, spec.shapes):
            continue
        if record.name not in spec.shapes:
            raise _invalid(f"tensor {record.name!r}: the base {spec.model_name!r} has no such tensor")
        shape = list(spec.shapes[record.name])
        raise _invalid(f"tensor {record.name!r}: shape {list(record.shape)} is not the base's {shape}")


def _check_codecs(manifest: Manifest, limits: DeltaLimits) -> None:
    known = CODECS.names()
    for record in manifest.tensors:
        if record.codec not in known:
            raise _invalid(
                f"tensor {record.name!r}: unknown codec {record.codec!r} (known: {', '.join(known)})",
                "install the package that provides the codec",
            )
        CODECS.require_allowed(record.codec)
        with _about(record.name):
            codec = get_codec(record.codec)
            if split_rows(record.name) is not None and not codec.for_added_rows:
                raise CodecError(f"added rows have codec {record.codec!r}, which cannot encode added rows")
            if codec.adds_up and not limits.sums:
                raise CodecError(f"codec {record.codec!r} is only for soups")
            normal = codec.normalise(record.params, record.shape)
            if repr(sorted(normal.items())) != repr(sorted(record.params.items())):  # 1 is not 1.0
                raise CodecError(f"parameters {record.params} are not in normal form {normal}")


def _check_sections(header: dict[str, Any], layout: Layout, data_bytes: int) -> None:
    """Check that the header lists exactly the sections that follow from the manifest, to the last byte."""
    starts = layout.section_starts()
    expected: dict[str, Any] = {}
    for name, label, dtype in SECTIONS:
        if dtype in starts:
            start, size = starts[dtype], layout.sections[dtype]
            expected[name] = {
                "dtype": label,
                "shape": [size // dtype.itemsize],
                "data_offsets": [start, start + size],
            }
            _check_room(layout, dtype, start, data_bytes)
    actual = {key: value for key, value in header.items() if key != "__metadata__"}
    for key in [*expected, *actual]:
        if actual.get(key) != expected.get(key):
            needed = expected.get(key, "absent")
            first = _first_tensor(layout, key)
            raise _invalid(f"section {key!r}{first} is {actual.get(key, 'absent')}, expected {needed}")
    if data_bytes != layout.data_bytes:
        raise _invalid(
            f"has {counted(data_bytes - layout.data_bytes, 'trailing byte')} after its last tensor"
        )


def _first_tensor(layout: Layout, section: str) -> str:
    dtypes = {name: dtype for name, _, dtype in SECTIONS}
    for tensor, fields in layout.fields.items():
        if any(field.dtype == dtypes.get(section) for field in fields):
            return f" (from tensor {tensor!r} on)"
    return ""


def _check_room(layout: Layout, dtype: torch.dtype, start: int, data_bytes: int) -> None:
    if start + layout.sections[dtype] <= data_bytes:
        return
    for name, fields in layout.fields.items():
        for field in fields:
            end = start + field.start + field.size
            if field.dtype == dtype and end > data_bytes:
                raise _invalid(
                    f"is truncated: tensor {name!r} ends at byte {end} of {counted(data_bytes, 'byte')} of data"
                )


@contextmanager
def _about(tensor: str) -> Iterator[None]:
    try:
        yield
    except CodecError as error:
        raise _invalid(f"tensor {tensor!r}: {error}") from error


@contextmanager
def _named_in_errors(path: Path) -> Iterator[None]:
    try:
        yield
    except GymError as error:
        raise GymError(error.code, f"{path}: {error.message}", error.hint) from error


def _invalid(message: str, hint: str = "") -> GymError:
    return GymError(ErrorCode.DELTA_INVALID, message, hint)


def apply_delta(model: nn.Module | Tensors, delta: DeltaFile, scale: float = 1.0) -> None:
    """Add ``scale * delta`` to the model's tensors in place.

    The sum is computed in float32 and then cast to the tensor's dtype. Whether the delta belongs to this base is
    checked when it is opened (``DeltaFile.open(path, spec)``); here names and shapes must match. Rows of added tokens
    replace or extend those of a module's embeddings and head, without ``scale``; its parameters may be new objects.

    Raises:
        GymError: ``BASE_MISMATCH`` naming the tensor, before anything is changed.
    """
    tensors = model_tensors(model)
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    for record in delta.manifest.tensors:
        if not fits_base(record.name, record.shape, shapes):
            actual = list(tensors[record.name].shape) if record.name in tensors else "absent"
            raise GymError(
                ErrorCode.BASE_MISMATCH,
                f"{delta.path}: tensor {record.name!r} {list(record.shape)} does not fit the model: {actual}",
            )
    if delta.added_rows is not None:
        require_vocabulary(model, delta.added_rows.names, str(delta.path))
    with torch.no_grad():
        for name in delta.names:
            target = tensors[name]
            change = delta.decode(name).mul_(scale).to(target.device)
            target.copy_(target.to(torch.float32) + change)
    if delta.added_rows is not None:
        rows = {name: delta.decode_added(name) for name in delta.added_rows.names}
        set_last_rows(model, delta.added_rows.size, rows)
