"""Sign deltas kept in memory multiply as ``signed_matmul`` does, and decode to what was encoded."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from gym_quant import CodecError, kernels
from gym_quant.kernels import BoundTerms, ResidentSigns, SignBatch, SignMatrix, decode_signs, signed_matmul

COLS, ROWS = 44, 100


def matrix(seed: int, group: int | None = None, per_row: bool = False) -> SignMatrix:
    generator = torch.Generator().manual_seed(seed)
    bits = torch.randint(0, 256, (ROWS, (COLS + 7) // 8), dtype=torch.uint8, generator=generator)
    bits[:, -1] &= 15  # 44 columns: the last byte is padded with zeros
    shape = (ROWS, -(-COLS // group)) if group else ((ROWS, 1) if per_row else (1,))
    return SignMatrix(bits, torch.rand(shape, generator=generator), COLS, group)


KINDS = [matrix(0), matrix(1, per_row=True), matrix(2, group=16), matrix(3, group=5), matrix(4, group=COLS)]


@pytest.mark.parametrize("mode", ["exact", "lookup", "lookup16"])
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
    tiles, padded = 2, 8  # rows to 64, bytes of a row to 4
    assert kept.nbytes == 64 * tiles * (padded + 4)
    before = kept.decode_block(0, ROWS)
    held.bits.zero_()
    assert torch.equal(kept.decode_block(0, ROWS), before)
    assert "tiled" not in vars(held)


def test_what_does_not_go_together_is_refused() -> None:
    other = ResidentSigns.of(SignMatrix(torch.zeros(8, 1, dtype=torch.uint8), torch.ones(1), 8))
    with pytest.raises(CodecError, match=r"variant 1 is \[8, 8\], not \[100, 44\]"):
        SignBatch([ResidentSigns.of(KINDS[0]), other])
    with pytest.raises(CodecError, match="variant 0: group_size 5 is not a multiple of 8"):
        SignBatch([ResidentSigns.of(KINDS[3])], "lookup")
    with pytest.raises(CodecError, match="mode is 'fast'"):
        SignBatch([other], "fast")


LOOKUP = ["lookup", "lookup16"]
WHOLE = [m for m in KINDS if m.whole_bytes]
native_code = pytest.mark.skipif(kernels.available() == ("torch",), reason="no native extension here")


def batch_of(mode: str, matrices: list[SignMatrix] = WHOLE) -> SignBatch:
    return SignBatch([ResidentSigns.of(m) for m in matrices], mode)


def some_rows(count: int, seed: int = 0) -> tuple[torch.Tensor, np.ndarray, torch.Tensor]:
    """Inputs, indices from -1, and what stands in y before."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, COLS, generator=generator)
    index = (np.arange(count) % (len(WHOLE) + 1) - 1).astype(np.int64)
    return x, index, torch.randn(count, ROWS, generator=generator)


@pytest.mark.parametrize("path", kernels.available())
@pytest.mark.parametrize("mode", LOOKUP)
def test_a_row_that_is_not_finite_becomes_nan_and_no_other_row_changes(path: str, mode: str) -> None:
    x, index, before = some_rows(9)
    x[3, 40], x[7, 0], x[0, 1] = float("nan"), float("inf"), float("nan")
    batch = batch_of(mode)
    with kernels.using(path):
        found, wanted = before.clone(), before.clone()
        batch.add(x, index, found)
        batch.add(x.nan_to_num(0.0, 0.0, 0.0), index, wanted)
    assert index[0] == -1
    assert found[[3, 7]].isnan().all()
    rest = [row for row in range(9) if row not in (3, 7)]
    assert torch.equal(found[rest], wanted[rest])


@native_code
@pytest.mark.parametrize("mode", LOOKUP)
def test_tables_are_made_once_for_batches_of_other_groups_and_heights(mode: str) -> None:
    x, index, y = some_rows(9)
    other = SignBatch([ResidentSigns.of(SignMatrix(WHOLE[0].bits[:30], torch.ones(1), COLS))] * 4, mode)
    tables = batch_of(mode).tables(x)
    for batch, rows in ((batch_of(mode), ROWS), (other, 30)):
        shared, alone = y[:, :rows].clone(), y[:, :rows].clone()
        batch.add(x, index, shared, tables=tables)
        batch.add(x, index, alone)
        assert torch.equal(shared, alone)
    some = batch_of(mode).tables(x, index)
    shared, alone = y.clone(), y.clone()
    batch_of(mode).add(x, index, shared, tables=some)
    batch_of(mode).add(x, index, alone)
    assert torch.equal(shared, alone)
    assert batch_of("exact").tables(x) is None


@native_code
def test_tables_without_a_row_that_is_wanted_are_refused_and_leave_y_alone() -> None:
    x, index, y = some_rows(9)
    tables, before = batch_of("lookup").tables(x, index), y.clone()
    with pytest.raises(CodecError, match="the tables lack a row"):
        batch_of("lookup").add(x, np.zeros(9, dtype=np.int64), y, tables=tables)
    assert torch.equal(y, before)


@pytest.mark.parametrize("path", kernels.available())
@pytest.mark.parametrize("mode", ["exact", *LOOKUP])
def test_columns_of_a_wider_y_get_the_terms_and_the_others_stay(path: str, mode: str) -> None:
    x, index, y = some_rows(9)
    wide = torch.randn(9, 20 + ROWS + 30)
    wide[:, 20 : 20 + ROWS] = y
    before = wide.clone()
    with kernels.using(path):
        batch_of(mode).add(x, index, wide[:, 20 : 20 + ROWS])
        batch_of(mode).add(x, index, y)
    assert torch.equal(wide[:, 20 : 20 + ROWS], y)
    assert torch.equal(wide[:, :20], before[:, :20])
    assert torch.equal(wide[:, 20 + ROWS :], before[:, 20 + ROWS :])


@native_code
@pytest.mark.parametrize("mode", ["exact", *LOOKUP])
def test_bound_terms_add_what_their_batches_add_one_by_one(mode: str) -> None:
    x, index, _ = some_rows(9)
    first, second = batch_of(mode), batch_of(mode, WHOLE[2:])
    place = np.array([-1, -1, 0, 1, -1], dtype=np.int64)
    y = torch.randn(9, 7 + 2 * ROWS)
    wanted = y.clone()
    first.add(x, index, wanted[:, 7 : 7 + ROWS])
    second.add(x, place[index], wanted[:, 7 + ROWS :])
    bound = BoundTerms([first, second], [7, 7 + ROWS], [None, place])
    bound.bind(kernels.path())(x.data_ptr(), 9, index.ctypes.data, y.data_ptr(), y.stride(0))
    assert torch.equal(y, wanted)


@native_code
def test_batches_that_do_not_go_together_are_not_bound() -> None:
    with pytest.raises(CodecError, match="cannot be combined"):
        BoundTerms([batch_of("exact"), batch_of("lookup")], [0, 100])
    with pytest.raises(CodecError, match="cannot be combined"):
        BoundTerms([batch_of("exact", KINDS)], [0])


@pytest.mark.parametrize("path", kernels.available())
def test_rows_of_several_variants_are_added_at_once(path: str) -> None:
    matrices = KINDS if path == "torch" else WHOLE
    batch = batch_of("exact", matrices)
    index = np.array([0, -1, 2, 1, 2], dtype=np.int64)
    rows, out = torch.tensor([99, 3, 0, 64, 7]), torch.randn(5, COLS)
    wanted = out.clone()
    for at, (variant, row) in enumerate(zip(index.tolist(), rows, strict=True)):
        if variant >= 0:
            wanted[at] += batch.variants[variant].decode_rows(row[None])[0]
    with kernels.using(path):
        batch.add_rows(index, rows, out)
    assert torch.equal(out, wanted)


@pytest.mark.parametrize("mode", LOOKUP)
def test_a_long_prompt_gives_every_row_what_it_gets_alone(mode: str) -> None:
    batch = batch_of(mode)
    x = torch.randn(300, COLS, generator=torch.Generator().manual_seed(3))
    index, y = np.zeros(300, dtype=np.int64), torch.zeros(300, ROWS)
    batch.add(x, index, y)
    for row in (0, 1, 150, 299):
        alone = torch.zeros(1, ROWS)
        batch.add(x[row : row + 1].contiguous(), index[:1], alone)
        assert torch.equal(y[row], alone[0])
