"""Packed formats for the linear layers of a base model, used for matrix products in serving.

    packed = get_linear("int8").pack(weight)       # [out, in], float32 or bfloat16
    packed.multiply(x, y)                          # y [n, out] = x [n, in] @ weight.T

A new format is one file in ``gym_quant/linears``, or an entry point of another package (``gym_quant.registry``).
``gym_quant.packed_file`` stores packed layers in a file.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import ClassVar, Self, cast

import torch
from torch import Tensor

from gym_quant.errors import CodecError
from gym_quant.kernels.program import Program
from gym_quant.registry import LINEARS, MemberError


class PackedLinear(ABC):
    """The weights ``[rows, cols]`` (out, in) of one linear layer, packed for products on the CPU.

    Attributes:
        format: Name of the format in files and settings.
        head_format: Format of the head of a model whose other layers have this format.
        rows: ``out``.
        cols: ``in``.
    """

    format: ClassVar[str]
    head_format: ClassVar[str] = "bfloat16"
    rows: int
    cols: int

    @property
    @abstractmethod
    def nbytes(self) -> int:
        """Return the number of bytes that a product with one row reads."""

    @classmethod
    @abstractmethod
    def pack(cls, weight: Tensor, group_size: int | None = None) -> Self:
        """Pack ``weight`` ``[out, in]``, float32, float16 or bfloat16.

        Args:
            weight: Finite numbers.
            group_size: Columns that share a scale; by default the format's.

        Raises:
            CodecError: For numbers that are not finite, and unsupported shapes, dtypes or group sizes.
        """

    @abstractmethod
    def multiply(self, x: Tensor, y: Tensor) -> None:
        """Write ``x @ W.T`` into ``y``.

        A row with a non-finite activation yields NaN or infinite outputs; other rows are unaffected.

        Args:
            x: ``[n, cols]`` float32, contiguous, on the CPU.
            y: ``[n, rows]``, as ``x``.

        Raises:
            CodecError: For unsupported shapes, dtypes, devices or strides.
        """

    def record(self, program: Program, x: Tensor, y: Tensor) -> bool:
        """Add ``multiply`` to a program of native calls; results are bit-identical.

        Args:
            program: The program.
            x: As in ``multiply``.
            y: As in ``multiply``, but its rows may be strided.

        Returns:
            False if there is no native call for it.
        """
        return False

    @abstractmethod
    def decode_block(self, start: int, stop: int) -> Tensor:
        """Decode rows ``start`` to ``stop`` into a new float32 tensor ``[stop - start, cols]``."""

    @abstractmethod
    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors to store, by name, without copying them."""

    @classmethod
    @abstractmethod
    def of(cls, tensors: Mapping[str, Tensor], rows: int, cols: int) -> Self:
        """Restore a layer from its ``tensors()`` without copying them.

        Raises:
            CodecError: For missing or mismatching tensors, and scales that are not finite.
        """


def linear_formats() -> tuple[str, ...]:
    """Return the sorted names of all formats."""
    return LINEARS.names()


def get_linear(format: str) -> type[PackedLinear]:
    """Return the format named ``format``.

    Raises:
        CodecError: If it does not exist.
    """
    try:
        return cast("type[PackedLinear]", LINEARS.type_of(format))
    except MemberError as error:
        raise CodecError(str(error)) from error


def check_product(x: Tensor, y: Tensor, rows: int, cols: int) -> None:
    """Refuse inputs that ``multiply`` does not support.

    Raises:
        CodecError: See ``multiply``.
    """
    for name, tensor, width in (("x", x, cols), ("y", y, rows)):
        if tensor.ndim != 2 or tensor.shape[1] != width or len(tensor) != len(x):
            raise CodecError(
                f"{name} is {list(tensor.shape)}, not [{len(x)}, {width}] for weights [{rows}, {cols}]"
            )
        if tensor.dtype != torch.float32 or not tensor.is_cpu or not tensor.is_contiguous():
            contiguous = "contiguous" if tensor.is_contiguous() else "strided"
            raise CodecError(
                f"{name} is {contiguous} {tensor.dtype} on {tensor.device}, not contiguous float32 on the CPU"
            )
