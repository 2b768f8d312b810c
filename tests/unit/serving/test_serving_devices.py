"""Serving code for other devices, run on a CPU and on torch's ``meta`` device."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from gym_fed.serving.engine import sampling
from gym_fed.serving.forward.attention import packed, packed_attention
from gym_fed.serving.forward.chunk import PackedTokens
from gym_fed.serving.forward.kv_cache import KVPool
from gym_fed.serving.forward.segments import Segments


def test_the_best_token_is_the_same_by_torch_as_by_numpy() -> None:
    logits = torch.randn(6, 50, generator=torch.Generator().manual_seed(0)).round()  # many equals
    logits[1] = float("-inf")
    logits[2, 7] = float("inf")
    assert sampling._best_by_torch(logits) == sampling._best(logits)


def test_a_row_that_is_not_a_number_is_seen_by_torch_as_by_numpy() -> None:
    logits = torch.randn(3, 20, generator=torch.Generator().manual_seed(1))
    logits[1, 4] = logits[1, 9] = float("nan")
    (places, peaks), (expected, _) = sampling._best_by_torch(logits), sampling._best(logits)
    assert places == expected
    assert [peak != peak for peak in peaks] == [False, True, False]


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("softcap", [None, 30.0])
def test_attention_of_a_packed_step_stays_on_its_device(window: int | None, softcap: float | None) -> None:
    def empty(*shape: int) -> torch.Tensor:
        return torch.empty(*shape, device="meta", dtype=torch.bfloat16)

    pool = KVPool(dtype="bfloat16", device="meta")
    long, short = pool.new_cache(), pool.new_cache()
    spans = [(0, 5, long), (5, 6, short)]
    for _, count, cache in [(0, 5, long), (5, 1, short)]:
        cache.reserve(count)
    with packed(PackedTokens(spans)):
        found, _ = packed_attention(
            SimpleNamespace(layer_idx=0),
            empty(1, 8, 6, 16),
            empty(1, 2, 6, 16),
            empty(1, 2, 6, 16),
            None,
            sliding_window=window,
            softcap=softcap,
        )
    assert found.device.type == "meta"
    assert found.shape == (1, 6, 8, 16)
    assert found.dtype == torch.bfloat16


def test_rows_of_variants_are_numbered_on_their_device() -> None:
    rows = Segments([(0, 0, 3), (1, 5, 40)], 44, 32, torch.device("meta"))
    assert rows.bulk == [(1, 5, 40)]
    assert rows.few is not None
    assert rows.owned is not None
    for part in (rows.few, rows.owned, rows.owner, rows.foreign((0, 1, 1))):
        assert part.device.type == "meta"
    assert rows.foreign((0, 1, 1)).shape == (38, 3)
