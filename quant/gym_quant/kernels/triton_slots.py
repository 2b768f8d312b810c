"""Multiply sign deltas in slots on CUDA, with one Triton kernel that reads each row's slot on the device.

For engines with CUDA graphs: buffers are static, nothing is read on the host, and a launch depends only on shapes. A
program computes ``BLOCK_ROWS`` rows times ``BLOCK_OUT`` outputs. It visits only the slots that its rows use, so the
tokens of a prompt read the bits of their delta once, and rows of eight variants read eight deltas. Rows with slot -1
add nothing; a program with only such rows returns at once. Tested in Triton's interpreter on a CPU; not run on a GPU
yet.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from gym_quant.errors import CodecError
from gym_quant.kernels.triton_matmul import interpreted, tl, triton

_BLOCK_ROWS, _BLOCK_OUT, _BLOCK_BYTES = 16, 64, 32
"""Block sizes; sixteen rows, outputs and inputs are the minimum for tensor cores."""


def add_signed_slots(x: Tensor, bits: Tensor, scales: Tensor, slots: Tensor, y: Tensor) -> None:
    """Add the term of each row's slot: ``y[row] += scales[slot] * sign(bits[slot]) @ x[row]``.

    Products are exact in ``x``'s dtype, since signs are; sums are float32.

    Args:
        x: ``[rows, in]`` float32, bfloat16 or float16, contiguous.
        bits: ``[slots, out, ceil(in / 8)]`` uint8, contiguous.
        scales: ``[slots, out]`` float32, contiguous.
        slots: ``[rows or more]`` int32: a row's slot, or -1.
        y: ``[rows, out]`` of any float dtype, changed in place; its columns are contiguous, its rows may be strided.

    Raises:
        CodecError: Without Triton, for tensors that are not all on one CUDA device (under Triton's interpreter: on one
            device), and for shapes that do not fit.
    """
    if triton is None:
        raise CodecError("sign deltas in slots need Triton, which cannot be imported: install triton")
    if not (x.is_cuda or interpreted()) or {x.device, bits.device, scales.device, slots.device, y.device} != {
        x.device
    }:
        raise CodecError(f"x is on {x.device} and y on {y.device}, not on one CUDA device")
    num_slots, out, width = bits.shape
    rows, cols = x.shape
    if width != -(-cols // 8) or scales.shape != (num_slots, out) or y.shape != (rows, out):
        raise CodecError(
            f"x {list(x.shape)}, bits {list(bits.shape)}, scales {list(scales.shape)} and y {list(y.shape)} do not fit"
        )
    if slots.ndim != 1 or len(slots) < rows or y.stride(1) != 1:
        raise CodecError(f"slots {list(slots.shape)} and y with strides {list(y.stride())} do not fit")
    if not rows:
        return
    grid = (triton.cdiv(out, _BLOCK_OUT), triton.cdiv(rows, _BLOCK_ROWS))
    _kernel()[grid](
        x.contiguous(),
        bits,
        scales,
        slots,
        y,
        rows,
        out,
        cols,
        width,
        y.stride(0),
        NUM_SLOTS=num_slots,
        BLOCK_ROWS=_BLOCK_ROWS,
        BLOCK_OUT=_BLOCK_OUT,
        BLOCK_BYTES=_BLOCK_BYTES,
        WIDE=interpreted(),  # the interpreter multiplies the bits of bfloat16 as integers
    )


def add_signed_reference(x: Tensor, bits: Tensor, scales: Tensor, slots: Tensor, y: Tensor) -> None:
    """Compute ``add_signed_slots`` in torch, row by row, for tests."""
    shifts = torch.arange(8, dtype=torch.uint8, device=bits.device)
    for row in range(len(x)):
        slot = int(slots[row])
        if 0 <= slot < len(bits):
            ones = ((bits[slot][:, :, None] >> shifts) & 1).flatten(1)[:, : x.shape[1]]
            term = (ones.to(torch.float32) * 2 - 1) @ x[row].to(torch.float32)
            y[row] += (term * scales[slot]).to(y.dtype)


def _add_by_slot(
    x_at: Any,
    bits_at: Any,
    scales_at: Any,
    slots_at: Any,
    y_at: Any,
    num_rows: Any,
    out: Any,
    cols: Any,
    width: Any,
    stride: Any,
    NUM_SLOTS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_OUT: tl.constexpr,
    BLOCK_BYTES: tl.constexpr,
    WIDE: tl.constexpr,
) -> None:
    """Add the terms of ``BLOCK_ROWS`` rows to ``BLOCK_OUT`` outputs per program."""
    o = tl.program_id(0) * BLOCK_OUT + tl.arange(0, BLOCK_OUT)
    r = tl.program_id(1) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    in_out, in_rows = o < out, r < num_rows
    slot_of = tl.load(slots_at + r, mask=in_rows, other=-1)
    if tl.max(slot_of, axis=0) < 0:
        return
    # 64-bit offsets, since the slots of a large layer have more than 2^31 bytes
    x_rows = x_at + r.to(tl.int64)[:, None] * cols
    total = tl.zeros((BLOCK_ROWS, BLOCK_OUT), dtype=tl.float32)
    for slot in range(NUM_SLOTS):
        mine = slot_of == slot
        if tl.sum(mine.to(tl.int32), axis=0) > 0:
            term = tl.zeros((BLOCK_ROWS, BLOCK_OUT), dtype=tl.float32)
            bits_cols = bits_at + (o.to(tl.int64) + tl.cast(slot, tl.int64) * out)[None, :] * width
            for start in range(0, width, BLOCK_BYTES):
                c = start + tl.arange(0, BLOCK_BYTES)
                there = (c < width)[:, None] & in_out[None, :]
                byte = tl.load(bits_cols + c[:, None], mask=there, other=0).to(tl.int32)
                for k in tl.static_range(8):
                    column = 8 * c + k
                    mask = mine[:, None] & (column < cols)[None, :]
                    value = tl.load(x_rows + column[None, :], mask=mask, other=0.0)
                    if WIDE:
                        value = value.to(tl.float32)
                    sign = tl.where(((byte >> k) & 1) == 1, 1.0, -1.0).to(value.dtype)
                    term += tl.dot(value, sign, input_precision="ieee")
            scale = tl.load(scales_at + tl.cast(slot, tl.int64) * out + o, mask=in_out, other=0.0)
            total += term * scale[None, :]
    target = y_at + r.to(tl.int64)[:, None] * stride + o[None, :]
    where = (slot_of >= 0)[:, None] & in_out[None, :]
    before = tl.load(target, mask=where, other=0.0)
    tl.store(target, (before.to(tl.float32) + total).to(before.dtype), mask=where)


@functools.cache
def _kernel() -> Any:
    """Return the kernel, which is compiled at its first launch. Needs Triton; importing this module does not."""
    return triton.jit(_add_by_slot)
