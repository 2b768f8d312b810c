"""Attention of trees in runs, beside attention over all pairs with a mask."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.nn import functional

from gym_fed.serving.forward.tree_attention import TreeAttention


def _visible(parents: list[int], lengths: list[int]) -> np.ndarray:
    """Of nodes in depth-first order, each with the number of its parent or -1."""
    ends = np.cumsum(lengths)
    seen = np.zeros((ends[-1], ends[-1]), dtype=bool)
    for parent, length, end in zip(parents, lengths, ends, strict=True):
        if parent >= 0:
            seen[end - length : end] = seen[ends[parent] - 1]
        seen[end - length : end, end - length : end] = np.tri(length, dtype=bool)
    return seen


@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (6, 2)])
def test_runs_of_trees_attend_as_all_pairs_behind_a_mask(heads: int, kv_heads: int) -> None:
    trees = [
        _visible([-1, 0, 0, 2, 2, 0], [130, 40, 3, 1, 2, 17]),
        _visible([-1], [1]),
        _visible([-1, 0, 0, 0], [9, 1, 1, 1]),
        _visible([-1], [150]),
    ]
    generator = torch.Generator().manual_seed(0)
    tokens = sum(len(one) for one in trees)
    query = torch.randn(heads, tokens, 8, generator=generator)
    key = torch.randn(kv_heads, tokens, 8, generator=generator)
    value = torch.randn(kv_heads, tokens, 4, generator=generator)
    seen = torch.block_diag(*(torch.from_numpy(one) for one in trees)).bool()
    wanted = functional.scaled_dot_product_attention(
        query[None].double(), key[None].double(), value[None].double(), attn_mask=seen, enable_gqa=True
    )[0].transpose(0, 1)
    attention = TreeAttention(trees, torch.float32, torch.device("cpu"))
    assert len(attention._products) > 1
    found = attention.attend(0, query, key, value, 8**-0.5)
    torch.testing.assert_close(found.double(), wanted, rtol=1e-5, atol=1e-5)
