"""Levels as planes of signs: the codec's own values, and products by the tables that sign deltas take."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from gym_quant import CodecError, get_codec, kernels
from gym_quant.kernels import BoundTerms, SignBatch, native
from gym_quant.kernels.level_tiles import LevelPlanes, ResidentTiles
from gym_quant.resident import DecodedBatch, Resident

CPU = torch.device("cpu")
FORMS = [
    ("ternary", {}),
    ("int2", {}),
    ("int2", {"symmetric": False}),
    ("int4", {}),
    ("int4", {"symmetric": False}),
    ("binary", {"symmetric": False}),
]
GROUPS: list[dict[str, Any]] = [
    {},
    {"group_size": 128},
    {"group_size": 24, "scale_dtype": "bfloat16"},
    {"group_size": 1100},
]
ROWS, COLS = 100, 1100
INDEX = np.array([0, 1, -1, 1, 0, -1, 1])

pytestmark = pytest.mark.skipif(kernels.available() == ("torch",), reason="no native extension here")


def held(name: str, params: dict[str, Any], kernel: str, seed: int = 0) -> tuple[Resident, torch.Tensor]:
    """A delta as serving keeps it for a kernel, and decoded by its codec."""
    codec = get_codec(name)
    delta = torch.randn(ROWS, COLS, generator=torch.Generator().manual_seed(seed)) * 0.01
    made = codec.encode(delta, **params)
    kept = codec.resident(made.payload, (ROWS, COLS), made.params, CPU)
    assert kept is not None
    return kept.for_kernel(kernel), codec.decode(made.payload, (ROWS, COLS), made.params)


@pytest.mark.parametrize("group", GROUPS, ids=str)
@pytest.mark.parametrize(("name", "params"), FORMS, ids=str)
def test_tiles_decode_to_the_bits_that_the_codec_decodes_to(
    name: str, params: dict[str, Any], group: dict[str, Any]
) -> None:
    kept, whole = held(name, params | group, "lookup")
    assert isinstance(kept, ResidentTiles)
    assert torch.equal(kept.decode_block(0, ROWS), whole)
    assert torch.equal(kept.decode_rows(torch.tensor([99, 0, 64])), whole[[99, 0, 64]])
    assert float(whole.abs().max()) <= kept.largest() * 1.0001


@pytest.mark.few(10, "groups and formats are independent")
@pytest.mark.parametrize("group", GROUPS, ids=str)
@pytest.mark.parametrize(("name", "params"), FORMS, ids=str)
def test_products_by_look_up_agree_on_every_path_and_with_the_decoded_delta(
    name: str, params: dict[str, Any], group: dict[str, Any]
) -> None:
    x = torch.randn(7, COLS, generator=torch.Generator().manual_seed(9))
    for kernel, most in (("lookup", 0.02), ("lookup16", 1e-4)):
        pairs = [held(name, params | group, kernel, seed) for seed in (0, 1)]
        batch = type(pairs[0][0]).batch([kept for kept, _ in pairs], kernel)
        assert batch.kernel == kernel
        found = []
        for path in (*kernels.available(), "avx512"):
            hidden = native.HAS_VBMI if len(found) == len(kernels.available()) else 0
            if path in kernels.available():
                with kernels.using(path), native.without(hidden):
                    found.append(torch.zeros(7, ROWS))
                    batch.add(x, INDEX, found[-1])
        assert all(torch.equal(found[0], other) for other in found[1:])
        wanted = torch.stack(
            [x[row] @ pairs[v][1].T if v >= 0 else torch.zeros(ROWS) for row, v in enumerate(INDEX)]
        )
        assert float((found[0] - wanted).norm() / wanted.norm()) < most


def test_signs_and_levels_of_one_input_share_tables_and_one_call() -> None:
    levels, _ = held("int4", {}, "lookup")
    signs, _ = held("bitdelta", {}, "lookup")
    batches = [type(one).batch([one], "lookup") for one in (levels, signs)]
    assert all(isinstance(batch, SignBatch) for batch in batches)
    x, index, y = torch.randn(3, COLS), np.zeros(3, dtype=np.int64), torch.zeros(3, 2 * ROWS)
    bound = BoundTerms(batches, [0, ROWS])
    bound.bind(kernels.path())(x.data_ptr(), 3, index.ctypes.data, y.data_ptr(), y.stride(0))
    tables = batches[0].tables(x)
    for batch, part in zip(batches, y.split(ROWS, dim=1), strict=True):
        alone = torch.zeros(3, ROWS)
        batch.add(x, index, alone, tables=tables)
        assert torch.equal(part, alone)


@pytest.mark.parametrize(
    ("name", "params"),
    [
        ("int8", {}),
        ("ternary", {"symmetric": False}),
        ("int4", {"group_size": 20}),
    ],
    ids=str,
)
def test_what_planes_cannot_say_is_decoded(name: str, params: dict[str, Any]) -> None:
    kept, whole = held(name, params, "lookup")
    batch = type(kept).batch([kept], "lookup")
    assert isinstance(batch, DecodedBatch)
    assert torch.equal(kept.decode_block(0, ROWS), whole)


def test_for_exact_and_without_native_code_the_codes_stay_as_they_are() -> None:
    kept, _ = held("int4", {}, "exact")
    assert not isinstance(kept, ResidentTiles)
    with kernels.using("torch"):
        kept, _ = held("int4", {}, "lookup")
    assert not isinstance(kept, ResidentTiles)


def test_levels_in_planes_are_refused_by_the_exact_kernel() -> None:
    kept, _ = held("int4", {}, "lookup")
    with pytest.raises(CodecError, match="support only lookup products"):
        type(kept).batch([kept], "exact")


@pytest.mark.parametrize(
    ("coefficients", "planes"),
    [
        ([[-2.0, -1.0, 0.0, 1.0]], LevelPlanes(4, (0, 1), 1, 0.5)),
        ([[-1.0, 0.0, 1.0]], LevelPlanes(3, (0, 0), 0, 0.5)),
        ([[-1.0, 1.0], [1.0, 1.0]], LevelPlanes(2, (0,), 0, 1.0)),
        ([[0.0, 1.0, 2.0, 3.0], [1.0] * 4], LevelPlanes(4, (0, 1), -3, 0.5)),
        ([[1.0, 0.0, 1.0, 4.0]], None),
        ([[0.0, 1.0, 2.0, 3.0], [2.0] * 4], None),
        ([[float(code) for code in range(32)]], None),
    ],
    ids=str,
)
def test_planes_are_found_from_what_each_code_stands_for(
    coefficients: list[list[float]], planes: LevelPlanes | None
) -> None:
    assert LevelPlanes.of(coefficients) == planes
