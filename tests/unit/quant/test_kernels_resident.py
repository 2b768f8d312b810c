"""Sign deltas kept in memory multiply as ``signed_matmul`` does, and decode to what was encoded."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from gym_quant import CodecError
from gym_quant.kernels import ResidentSigns, SignBatch, SignMatrix, decode_signs, signed_matmul

COLS, ROWS = 44, 100


def matrix(seed: int, group: int | None = None, per_row: bool = False) -> SignMatrix:
    generator = torch.Generator().manual_seed(seed)
    bits = torch.randint(0, 256, (ROWS, (COLS + 7) // 8), dtype=torch.uint8, generator=generator)
    bits[:, -1] &= 15  # 44 columns: the last byte is padded with zeros
    shape = (ROWS, -(-COLS // group)) if group else ((ROWS, 1) if per_row else (1,))
    return SignMatrix(bits, torch.rand(shape, generator=generator), COLS, group)


KINDS = [matrix(0), matrix(1, per_row=True), matrix(2, group=16), matrix(3, group=5), matrix(4, group=COLS)]


@pytest.mark.parametrize("mode", ["exact", "lookup"])
@pytest.mark.parametrize("batch", [1, 9, 70])
def test_a_batch_of_resident_signs_adds_what_signed_matmul_adds(mode: str, batch: int) -> None:
    matrices = [m for m in KINDS if mode == "exact" or m.whole_bytes]
    generator = torch.Generator().manual_seed(batch)
    x = torch.randn(batch, COLS, generator=generator)
    index = np.arange(batch, dtype=np.int64) % (len(matrices) + 1) - 1
    y = torch.randn(batch, ROWS, generator=generator)
    wanted = signed_matmul(x, matrices, index.tolist(), y.clone(), mode)
    SignBatch([ResidentSigns.of(m) for m in matrices], mode).add(x, index, y)
    assert torch.allclose(y, wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("held", KINDS, ids=["tensor", "row", "group", "odd", "whole"])
def test_rows_and_blocks_decode_to_scale_times_sign(held: SignMatrix) -> None:
    wide = held.scales.expand(ROWS, 1) if held.group_size is None else held.scales
    wanted = decode_signs(held.bits, wide, COLS, held.group_size or COLS)
    kept = ResidentSigns.of(held)
    some = torch.tensor([99, 0, 64, 63, 0])
    assert torch.equal(kept.decode_rows(some), wanted[some])
    assert torch.equal(kept.decode_block(64, 100), wanted[64:])
    assert torch.equal(kept.decode_block(0, 100), wanted)


def test_bits_are_held_once_and_view_nothing_that_was_given() -> None:
    held = matrix(0)
    kept = ResidentSigns.of(held)
    assert kept.nbytes <= (held.bits.nbytes + 4 * ROWS) * 128 / ROWS
    before = kept.decode_block(0, ROWS)
    held.bits.zero_()
    assert torch.equal(kept.decode_block(0, ROWS), before)
    assert "tiled" not in vars(held)


def test_what_does_not_go_together_is_refused() -> None:
    other = ResidentSigns.of(SignMatrix(torch.zeros(8, 1, dtype=torch.uint8), torch.ones(1), 8))
    with pytest.raises(CodecError, match=r"variant 1 is \[8, 8\], not \[100, 44\]"):
        SignBatch([ResidentSigns.of(KINDS[0]), other])
    with pytest.raises(CodecError, match="variant 0: group_size 5 is no multiple of 8"):
        SignBatch([ResidentSigns.of(KINDS[3])], "lookup")
    with pytest.raises(CodecError, match="mode is 'fast'"):
        SignBatch([other], "fast")
