"""``signed_matmul`` on CUDA in Triton. Tested in Triton's interpreter on a CPU; not run on a GPU yet.

It is imported only when ``signed_matmul`` gets CUDA tensors. Triton comes with torch's CUDA builds on Linux. The only
mode uses float32 activations and sums; ``lookup`` is for processors without wide multipliers. With
``TRITON_INTERPRET=1`` in the environment before Triton is imported, the kernel runs on CPU tensors, slowly.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from gym_quant.errors import CodecError
from gym_quant.kernels.sign_matrix import SignMatrix

triton: Any = None
tl: Any = None
_MISSING = ""
try:
    triton = importlib.import_module("triton")
    tl = importlib.import_module("triton.language")
except ImportError as error:  # reported to the caller below, with the module's name
    _MISSING = str(error)

_BLOCK_OUT, _BLOCK_BYTES = 64, 32


def signed_matmul_cuda(
    x: Tensor, variants: Sequence[SignMatrix], index: Sequence[int], y: Tensor, mode: str = "exact"
) -> Tensor:
    """Compute ``signed_matmul`` for CUDA tensors; variants on the CPU are copied to ``x``'s device per call.

    Args:
        x: ``[batch, in]``; converted to float32.
        variants: The deltas, all ``[out, in]``.
        index: ``[batch]``: a row's variant, or -1.
        y: ``[batch, out]`` float32 on the same device, changed in place.
        mode: ``exact``.

    Raises:
        CodecError: Without Triton, for tensors that are not all on one CUDA device (under Triton's interpreter: on one
            device), and for ``lookup``.
    """
    if triton is None:
        raise CodecError(
            f"CUDA tensors need Triton, which cannot be imported ({_MISSING}): "
            "install triton, or move x and y to the CPU"
        )
    if x.device != y.device or not (x.is_cuda or interpreted()):
        raise CodecError(f"x is on {x.device} and y on {y.device}, not on one CUDA device")
    if mode != "exact":
        raise CodecError(f"mode {mode!r} runs only on the CPU: use exact on CUDA")
    dense = x.detach().to(torch.float32).contiguous()
    rows_of: dict[int, list[int]] = {}
    for row, variant in enumerate(index):
        if variant >= 0:
            rows_of.setdefault(variant, []).append(row)
    for variant, rows in rows_of.items():
        with torch.cuda.device(x.device) if x.is_cuda else contextlib.nullcontext():
            _launch(dense, variants[variant], torch.tensor(rows, dtype=torch.int64, device=x.device), y)
    return y


def interpreted() -> bool:
    """Return True if kernels run in Triton's interpreter, on CPU tensors."""
    return bool(triton.knobs.runtime.interpret)


def _launch(x: Tensor, matrix: SignMatrix, rows: Tensor, y: Tensor) -> None:
    out, width = matrix.bits.shape
    bits = matrix.bits.to(x.device).contiguous()
    wide = matrix.scales.expand(out, 1) if matrix.scales.ndim < 2 else matrix.scales
    scales = wide.to(x.device).contiguous()
    grid = (triton.cdiv(out, _BLOCK_OUT), len(rows))
    _kernel()[grid](
        x,
        bits,
        scales,
        rows,
        y,
        out,
        matrix.cols,
        width,
        scales.shape[1],
        matrix.group_size or matrix.cols,
        BLOCK_OUT=_BLOCK_OUT,
        BLOCK_BYTES=_BLOCK_BYTES,
    )


def _signed_rows(
    x_at: Any,
    bits_at: Any,
    scales_at: Any,
    rows_at: Any,
    y_at: Any,
    out: Any,
    cols: Any,
    width: Any,
    groups: Any,
    group: Any,
    BLOCK_OUT: tl.constexpr,
    BLOCK_BYTES: tl.constexpr,
) -> None:
    """Compute ``BLOCK_OUT`` outputs of one row per program. A byte of bits is read once for eight inputs."""
    o = tl.program_id(0) * BLOCK_OUT + tl.arange(0, BLOCK_OUT)
    row = tl.load(rows_at + tl.program_id(1))
    inside = o < out
    # 64-bit, since a layer of a large model has more than 2^31 weights
    bits_row = bits_at + o.to(tl.int64)[:, None] * width
    scales_row = scales_at + o.to(tl.int64)[:, None] * groups
    total = tl.zeros((BLOCK_OUT,), dtype=tl.float32)
    for start in range(0, width, BLOCK_BYTES):
        c = start + tl.arange(0, BLOCK_BYTES)
        byte = tl.load(bits_row + c[None, :], mask=inside[:, None] & (c < width)[None, :], other=0).to(
            tl.int32
        )
        for k in tl.static_range(8):
            column = 8 * c + k
            there = column < cols
            value = tl.load(x_at + row * cols + column, mask=there, other=0.0)
            where = inside[:, None] & there[None, :]
            scale = tl.load(scales_row + (column // group)[None, :], mask=where, other=0.0)
            signed = tl.where(((byte >> k) & 1) == 1, value[None, :], -value[None, :])
            total += tl.sum(signed * scale, axis=1)
    target = y_at + row * out + o
    tl.store(target, tl.load(target, mask=inside, other=0.0) + total, mask=inside)


@functools.cache
def _kernel() -> Any:
    """Return the kernel, which is compiled at its first launch. Needs Triton; importing this module does not."""
    return triton.jit(_signed_rows)
