"""Deltas that serving keeps packed in memory for repeated addition, as codecs provide them.

``Codec.resident`` chooses the form. A codec of exactly signs and scales gets ``ResidentSigns`` by ``Codec.signs``; a
codec whose rows decode separately returns ``ResidentLevels``, and one of factors ``ResidentFactors``. Any other form is
a subclass of ``Resident`` with three methods, and ``batch`` if it multiplies faster than by decoding.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, TypeAlias

import numpy as np
import torch
from torch import Tensor

_BLOCK = 1 << 18
"""Number of values to decode at once: 1 MiB of float32, which stays in a core's cache (with 8 MiB, int4 took 4 times as
long)."""

IndexArray: TypeAlias = np.ndarray[Any, np.dtype[np.int64]]
Fields: TypeAlias = Mapping[str, Tensor]


class Resident(ABC):
    """A packed delta ``[rows, cols]`` in its own memory, never a view of a file.

    Attributes:
        form: Name of its products in serving's statistics: ``signs``, ``levels``, ...
        rows: ``out``.
        cols: ``in``.
    """

    form: ClassVar[str]
    rows: int
    cols: int

    @property
    @abstractmethod
    def nbytes(self) -> int:
        """Memory in bytes."""

    @abstractmethod
    def decode_rows(self, rows: Tensor) -> Tensor:
        """Decode rows by number (``[n]`` int64, any order): ``[n, cols]`` float32."""

    @abstractmethod
    def decode_block(self, start: int, stop: int) -> Tensor:
        """Decode rows ``start`` (a multiple of 64) to ``stop``: ``[stop - start, cols]`` float32."""

    def add(self, x: Tensor, y: Tensor) -> None:
        """Compute ``y += x @ delta.T`` in ``x``'s dtype, decoding block by block.

        Args:
            x: ``[n, cols]``.
            y: ``[n, rows]``, changed in place.
        """
        for start, stop in self.blocks():
            y[:, start:stop] += x @ self.decode_block(start, stop).to(x.dtype).T

    def largest(self) -> float:
        """Return an upper bound on the magnitude of decoded values."""
        return max(float(self.decode_block(*block).abs().max()) for block in self.blocks())

    def check_kernel(self, kernel: str) -> None:
        """Refuse an unsupported sign kernel (``exact``, ``lookup``, ``lookup16``); decoding supports all.

        Raises:
            CodecError: If this delta cannot be multiplied by ``kernel``.
        """
        del kernel

    def for_kernel(self, kernel: str) -> Resident:
        """Return the form that ``kernel`` multiplies fastest; by default, this one.

        Raises:
            CodecError: See ``check_kernel``.
        """
        self.check_kernel(kernel)
        return self

    def blocks(self) -> Iterator[tuple[int, int]]:
        """Yield the first row of every block (a multiple of 64) and its end."""
        step = max(64, _BLOCK // self.cols // 64 * 64)
        for start in range(0, self.rows, step):
            yield start, min(self.rows, start + step)

    @classmethod
    def batch(cls, variants: Sequence[Any], kernel: str) -> ResidentBatch:
        """Batch variants of one layer, all of this class; ``kernel`` is how sign deltas are multiplied.

        Raises:
            CodecError: If they cannot be combined, or do not support the kernel.
        """
        del kernel
        return DecodedBatch(variants)


class ResidentBatch(ABC):
    """A batch of variants of one layer.

    Attributes:
        kernel: Its kernel in serving's statistics: ``exact``, ``lookup``, ``lookup16``, ``decoded``.
        any_stride: True if rows of ``y`` may be strided, such as a slice of columns.
    """

    kernel: str
    any_stride: ClassVar[bool] = False

    def tables(self, x: Tensor, index: IndexArray | None = None, path: str | None = None) -> object | None:
        """Return data that ``add`` of any batch with this kernel can reuse for ``x``, or None."""
        del x, index, path
        return None

    @abstractmethod
    def add(
        self, x: Tensor, index: IndexArray, y: Tensor, path: str | None = None, tables: object | None = None
    ) -> None:
        """Compute ``y[b] += delta[index[b]] @ x[b]`` for every row with an index that is not -1.

        Args:
            x: ``[batch, in]`` float32, contiguous, on the variants' device.
            index: ``[batch]`` int64, from -1 to the number of variants.
            y: ``[batch, out]`` float32, changed in place; contiguous, unless ``any_stride``.
            path: Result of ``kernels.path()``, for callers that make many calls.
            tables: The tables of ``x``, from ``tables`` of a batch with the same kernel.

        Raises:
            CodecError: For activations that the kernel does not support.
        """


class DecodedBatch(ResidentBatch):
    """A batch of any forms, decoded block by block for all rows of a variant, without a cache."""

    kernel = "decoded"

    def __init__(self, variants: Sequence[Resident]) -> None:
        self.variants = tuple(variants)

    def add(
        self, x: Tensor, index: IndexArray, y: Tensor, path: str | None = None, tables: object | None = None
    ) -> None:
        del path, tables
        for number, variant in enumerate(self.variants):
            places = np.flatnonzero(index == number)
            if len(places) == len(index):
                variant.add(x, y)
            elif len(places):
                rows = torch.from_numpy(places).to(x.device)
                part = y.index_select(0, rows)
                variant.add(x.index_select(0, rows), part)
                y[rows] = part


class ResidentLevels(Resident):
    """A payload as in its file (codes and shared numbers) that is decoded block by block.

    Args:
        fields: The payload. A matrix has a row for each row of the delta; other fields belong to all rows.
        rows: Rows of the delta.
        cols: Columns of the delta.
        decode: Decodes the fields of some rows to ``[n, cols]`` float32 on their device.
        device: Device to which every field is copied.
        largest: Upper bound on the magnitude of the values; None to compute it when needed.
    """

    form = "levels"

    def __init__(
        self,
        fields: Fields,
        rows: int,
        cols: int,
        decode: Callable[[dict[str, Tensor]], Tensor],
        device: torch.device,
        largest: float | None = None,
    ) -> None:
        self.rows, self.cols = rows, cols
        self._fields = copied(fields, device)
        self._decode, self._largest = decode, largest

    @property
    def nbytes(self) -> int:
        return sum(field.nbytes for field in self._fields.values())

    def decode_rows(self, rows: Tensor) -> Tensor:
        return self._decode({k: f[rows] if f.ndim > 1 else f for k, f in self._fields.items()})

    def decode_block(self, start: int, stop: int) -> Tensor:
        return self._decode({k: f[start:stop] if f.ndim > 1 else f for k, f in self._fields.items()})

    def largest(self) -> float:
        return super().largest() if self._largest is None else self._largest


class ResidentFactors(Resident):
    """A low-rank delta ``scaling * b @ a`` as the factors of its file; quantised ones stay packed.

    Args:
        fields: The payload, or ``a`` and ``b`` themselves.
        rows: Rows of the delta.
        cols: Columns of the delta.
        decode: Decodes a payload on the CPU to ``a`` ``[r, cols]`` and ``b`` ``[rows, r]``; None if the fields are
            these.
        device: Device to which every field is copied.
        scaling: Factor of the product.
    """

    form = "factors"

    def __init__(
        self,
        fields: Fields,
        rows: int,
        cols: int,
        decode: Callable[[dict[str, Tensor]], tuple[Tensor, Tensor]] | None,
        device: torch.device,
        scaling: float = 1.0,
    ) -> None:
        self.rows, self.cols, self.scaling = rows, cols, scaling
        self._fields, self._decode, self._device = copied(fields, device), decode, device
        if decode is None:
            self._fields["b"] = self._fields["b"].T.contiguous().T  # multiplied as [r, rows]

    @property
    def nbytes(self) -> int:
        return sum(field.nbytes for field in self._fields.values())

    def factors(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return ``a`` ``[r, cols]`` and ``scaling * b`` ``[rows, r]`` in a dtype, possibly as views."""
        a, b = self._factors()
        if self.scaling != 1.0:
            b = b.to(torch.float32) * self.scaling
        return a.to(dtype), b.to(dtype)

    def scaled_once(self, dtype: torch.dtype) -> ResidentFactors:
        """Fold the scaling into ``b`` if that takes no more memory, as for plain factors of ``dtype``."""
        if self.scaling == 1.0 or self._decode is not None or self._fields["b"].dtype != dtype:
            return self
        _, b = self.factors(dtype)
        return ResidentFactors({"a": self._fields["a"], "b": b}, self.rows, self.cols, None, self._device)

    def unpacked(self) -> ResidentFactors:
        """Decode the factors in advance, for a delta that is used at every step."""
        if self._decode is None:
            return self
        fields = dict(zip("ab", self._factors(), strict=True))
        return ResidentFactors(fields, self.rows, self.cols, None, self._device, self.scaling)

    def decode_rows(self, rows: Tensor) -> Tensor:
        return self._product(rows)

    def decode_block(self, start: int, stop: int) -> Tensor:
        return self._product(slice(start, stop))

    def _factors(self) -> tuple[Tensor, Tensor]:
        if self._decode is None:
            return self._fields["a"], self._fields["b"]
        a, b = self._decode({name: field.cpu() for name, field in self._fields.items()})
        return a.to(self._device), b.to(self._device)

    def _product(self, rows: Tensor | slice) -> Tensor:
        a, b = self._factors()
        return (b[rows].to(torch.float32) * self.scaling) @ a.to(torch.float32)

    def add(self, x: Tensor, y: Tensor) -> None:
        """Compute ``y += (x @ a.T) @ (scaling * b).T``."""
        a, b = self.factors(x.dtype)
        y += (x @ a.T) @ b.T


class Transposed(Resident):
    """The transpose ``[cols, rows]`` of a delta, for parameters stored as ``[in, out]``."""

    def __init__(self, inner: Resident) -> None:
        self.inner = inner
        self.rows, self.cols = inner.cols, inner.rows

    @property
    def form(self) -> str:  # type: ignore[override]
        """The form of the wrapped delta."""
        return self.inner.form

    @property
    def nbytes(self) -> int:
        return self.inner.nbytes

    def decode_rows(self, rows: Tensor) -> Tensor:
        return torch.cat([self.inner.decode_block(*block)[:, rows] for block in self.inner.blocks()]).T

    def decode_block(self, start: int, stop: int) -> Tensor:
        return torch.cat([self.inner.decode_block(*block)[:, start:stop] for block in self.inner.blocks()]).T

    def largest(self) -> float:
        return self.inner.largest()

    def add(self, x: Tensor, y: Tensor) -> None:
        """Add in float32, since the wrapped delta's blocks of rows are columns here."""
        term = torch.zeros(y.shape, dtype=torch.float32, device=y.device)
        for start, stop in self.inner.blocks():
            term += x[:, start:stop] @ self.inner.decode_block(start, stop).to(x.dtype)
        y += term


def copied(fields: Fields, device: torch.device) -> dict[str, Tensor]:
    """Copy fields into their own memory."""
    return {name: field.to(device, copy=True).contiguous() for name, field in fields.items()}
