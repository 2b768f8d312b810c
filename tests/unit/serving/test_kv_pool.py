"""Blocks of a KV cache: ownership, copy on write, and their return to the pool."""

from __future__ import annotations

import gc
import random

import pytest
import torch

from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.serving.forward.kv_cache import KVCache, KVPool, LayerShape

SHAPES = {0: LayerShape(2, 8, 8), 1: LayerShape(1, 4, 6)}
BLOCK_BYTES = 16 * (2 * 8 + 2 * 16 + 4 + 16) * 4


def pool_of(blocks: int | None, dtype: str = "float32") -> KVPool:
    return KVPool(None if blocks is None else blocks * BLOCK_BYTES, dtype=dtype, shapes=SHAPES)


def fill(cache: KVCache, tokens: int, value: float) -> None:
    """As a step does: reserve, write, count."""
    assert cache.reserve(tokens)
    for number, shape in SHAPES.items():
        keys = torch.full((tokens, shape.kv_heads, shape.dim), value)
        cache.pool.layers[number].append(
            cache.blocks, cache.length, keys, keys[:, :, :1].expand(-1, -1, shape.value_dim)
        )
    cache.advance(tokens)


def held(cache: KVCache, layer: int = 0) -> list[float]:
    keys, values = cache.pool.layers[layer].read(cache.blocks, 0, cache.length, torch.float32)
    assert torch.equal(keys.amax(2), values.amin(2))
    return keys[0, :, 0].tolist()


def test_a_pool_beyond_the_memory_is_refused_by_name() -> None:
    with pytest.raises(GymError, match="does not fit in memory") as error:
        KVPool(1 << 60, shapes=SHAPES)
    assert error.value.code is ErrorCode.CONFIG_INVALID
    assert error.value.hint == "lower engine.kv_cache_size"


def test_a_cache_takes_a_block_for_every_sixteen_tokens_and_gives_all_back() -> None:
    pool = pool_of(5)
    assert (pool.num_blocks, pool.free_blocks, pool.block_bytes) == (5, 5, BLOCK_BYTES)
    cache = pool.new_cache()
    fill(cache, 16, 1.0)
    assert (cache.capacity, pool.free_blocks) == (16, 4)
    fill(cache, 17, 2.0)
    assert (cache.length, cache.capacity, cache.bytes, pool.free_blocks) == (33, 48, 3 * BLOCK_BYTES, 2)
    assert pool.bytes_used == 3 * BLOCK_BYTES
    assert held(cache) == held(cache, 1) == [1.0] * 16 + [2.0] * 17
    cache.release()
    cache.release()
    assert (cache.length, pool.free_blocks, pool.bytes_used) == (0, 5, 0)


def test_a_limited_pool_refuses_what_it_lacks_and_changes_nothing() -> None:
    pool = pool_of(3)
    cache, other = pool.new_cache(), pool.new_cache()
    fill(cache, 20, 1.0)
    assert not other.reserve(17)
    assert (other.capacity, pool.free_blocks) == (0, 1)
    assert other.reserve(16)
    assert not cache.reserve(13)
    assert cache.reserve(12)
    assert (cache.capacity, held(cache)) == (32, [1.0] * 20)
    with pytest.raises(GymError, match="smaller than one block") as error:
        KVPool(BLOCK_BYTES - 1, shapes=SHAPES)
    assert error.value.code is ErrorCode.CONFIG_INVALID


def test_a_pool_without_a_limit_grows_and_keeps_what_it_holds() -> None:
    pool = pool_of(None)
    first = pool.num_blocks
    caches = [pool.new_cache() for _ in range(10)]
    for number, cache in enumerate(caches):
        fill(cache, 40, float(number))
    assert pool.num_blocks > first
    assert [held(cache) for cache in caches] == [[float(number)] * 40 for number in range(10)]
    assert len({block for cache in caches for block in cache.blocks}) == 30


@pytest.mark.parametrize("cut", [0, 5, 16, 17, 33])
def test_a_cache_that_is_cut_back_gives_its_last_blocks_back(cut: int) -> None:
    pool = pool_of(4)
    cache = pool.new_cache()
    fill(cache, 33, 1.0)
    cache.truncate(cut)
    assert (cache.length, pool.free_blocks) == (cut, 4 - -(-cut // 16))
    fill(cache, 10, 2.0)
    assert held(cache) == [1.0] * cut + [2.0] * 10
    with pytest.raises(ValueError, match="length 99"):
        cache.truncate(99)


@pytest.mark.parametrize("length", [16, 20])
def test_branches_share_the_beginning_and_write_to_blocks_of_their_own(length: int) -> None:
    pool = pool_of(8)
    cache = pool.new_cache()
    fill(cache, length, 1.0)
    branches = [cache.branch() for _ in range(2)]
    assert pool.free_blocks == 8 - len(cache.blocks)
    for number, branch in enumerate(branches):
        fill(branch, 6, 2.0 + number)
    fill(cache, 3, 9.0)
    cache.truncate(4)
    fill(cache, 2, 8.0)
    assert held(cache) == [1.0] * 4 + [8.0] * 2
    assert [held(one) for one in branches] == [[1.0] * length + [2.0 + number] * 6 for number in range(2)]
    for one in (cache, *branches):
        one.release()
    assert pool.free_blocks == 8


def test_a_branch_without_a_block_for_its_copy_changes_nothing() -> None:
    pool = pool_of(2)
    cache = pool.new_cache()
    fill(cache, 20, 1.0)
    branch = cache.branch()
    assert not branch.reserve(1)
    assert not cache.reserve(1)
    branch.release()
    assert cache.reserve(1)
    assert held(cache) == [1.0] * 20


def test_a_cache_that_nobody_holds_any_more_gives_its_blocks_back() -> None:
    pool = pool_of(4)
    cache = pool.new_cache()
    fill(cache, 40, 1.0)
    branch = cache.branch()
    del cache
    gc.collect()
    assert pool.free_blocks == 1
    del branch
    gc.collect()
    assert pool.free_blocks == 4


def test_a_layer_whose_keys_change_their_shape_is_refused() -> None:
    with pytest.raises(GymError, match="layer 1") as error:
        pool_of(2).layer(1, LayerShape(2, 4, 6))
    assert error.value.code is ErrorCode.MODEL_INVALID


def test_no_block_is_lost_or_held_by_two_whatever_is_done() -> None:
    chance = random.Random(0)
    pool = pool_of(12)
    live: list[tuple[KVCache, list[float]]] = []
    for step in range(600):
        kind = chance.randrange(5)
        if kind == 0 or not live:
            live.append((pool.new_cache(), []))
        cache, wanted = chance.choice(live)
        if kind == 1:
            count = chance.randint(1, 30)
            if cache.reserve(count):
                fill(cache, count, float(step))
                wanted += [float(step)] * count
        elif kind == 2:
            live.append((cache.branch(), list(wanted)))
        elif kind == 3:
            length = chance.randint(0, len(wanted))
            cache.truncate(length)
            del wanted[length:]
        elif kind == 4:
            cache.release()
            live = [one for one in live if one[0] is not cache]
        assert len({block for one, _ in live for block in one.blocks}) == 12 - pool.free_blocks
    assert all(held(one) == expected for one, expected in live if expected)
    for one, _ in live:
        one.release()
    assert pool.free_blocks == 12
