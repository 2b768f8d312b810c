"""The prefix cache: hits, their scope, and eviction."""

from __future__ import annotations

import random

import pytest
import torch

from gym_fed.serving.engine.admission import PrefixCache
from gym_fed.serving.forward.kv_cache import KVCache, KVPool, LayerShape

SHAPES = {0: LayerShape(1, 4, 4)}
BLOCK_BYTES = 16 * (4 + 16) * 4
ALICE, BOB, TUNED = (None, "alice"), (None, "bob"), ("ab" * 32, "alice")


def made(blocks: int) -> tuple[KVPool, PrefixCache]:
    pool = KVPool(blocks * BLOCK_BYTES, shapes=SHAPES)
    return pool, PrefixCache(pool)


def run(cache: KVCache, ids: list[int]) -> bool:
    """Prefill what the cache lacks of ``ids``: a token's key is its number."""
    new = ids[cache.length :]
    if not cache.reserve(len(new)):
        return False
    keys = torch.tensor(new, dtype=torch.float32)[:, None, None].expand(-1, 1, 4)
    cache.pool.layers[0].append(cache.blocks, cache.length, keys, keys)
    cache.advance(len(new))
    return True


def held(cache: KVCache) -> list[int]:
    return [
        int(x) for x in cache.pool.layers[0].read(cache.blocks, 0, cache.length, torch.float32)[0][0, :, 0]
    ]


def send(prefixes: PrefixCache, scope: object, ids: list[int]) -> int:
    """A request from beginning to end; returns the tokens that were found."""
    cache = prefixes.new_cache(scope, ids)
    found = cache.length
    assert held(cache) == ids[:found]
    assert run(cache, ids)
    prefixes.insert(scope, ids, cache)
    cache.release()
    return found


def test_the_full_blocks_of_an_earlier_prompt_are_found() -> None:
    pool, prefixes = made(20)
    ids = list(range(100, 140))
    assert send(prefixes, ALICE, ids) == 0
    assert send(prefixes, ALICE, [*ids[:35], 1, 2, 3]) == 32
    assert send(prefixes, ALICE, [*ids[:30], 1, 2, 3]) == 16
    assert send(prefixes, ALICE, [7, *ids]) == 0
    assert (prefixes.tokens_asked, prefixes.tokens_found) == (40 + 38 + 33 + 41, 48)
    assert pool.free_blocks == 20


@pytest.mark.parametrize(("length", "found"), [(16, 0), (17, 16), (32, 16), (33, 32)])
def test_a_token_is_left_to_compute(length: int, found: int) -> None:
    _, prefixes = made(20)
    ids = list(range(length))
    send(prefixes, ALICE, ids)
    assert send(prefixes, ALICE, ids) == found


def test_nothing_is_found_of_another_user_or_another_variant() -> None:
    _, prefixes = made(20)
    ids = list(range(40))
    send(prefixes, ALICE, ids)
    assert send(prefixes, BOB, ids) == 0
    assert send(prefixes, TUNED, ids) == 0
    assert send(prefixes, TUNED, ids) == 32


def test_what_was_forgotten_is_not_found_and_its_blocks_are_free() -> None:
    pool, prefixes = made(6)
    ids = list(range(40))
    send(prefixes, ALICE, ids)
    send(prefixes, TUNED, ids)
    running = prefixes.new_cache(TUNED, ids)
    prefixes.forget(TUNED)
    assert len(prefixes) == 2
    assert held(running) == ids[:32]
    running.release()
    assert send(prefixes, TUNED, ids) == 0
    assert send(prefixes, ALICE, ids) == 32
    assert pool.free_blocks == 6


def test_blocks_of_running_requests_stay_and_the_oldest_others_go_from_their_end() -> None:
    pool, prefixes = made(6)
    old, new, other = ([base + at for at in range(33)] for base in (0, 100, 200))
    send(prefixes, ALICE, old)
    send(prefixes, ALICE, new)
    running = prefixes.new_cache(ALICE, new)
    assert run(running, new)  # 3 blocks; 1 is free, and 2 are of the old prompt
    assert pool.free_blocks == 3
    held_back = pool.new_cache()
    assert run(held_back, [7] * 32)  # the free one, and the end of the old prompt
    beginning = prefixes.new_cache(ALICE, old)
    assert held(beginning) == old[:16]
    beginning.release()
    held_back.release()
    assert not pool.new_cache().reserve(16 * 4)
    assert send(prefixes, ALICE, other) == 0
    assert held(running) == new
    running.release()
    assert pool.free_blocks == 6


def test_a_block_that_is_written_again_is_not_found() -> None:
    _, prefixes = made(8)
    ids = list(range(32))
    cache = prefixes.new_cache(ALICE, ids)
    assert run(cache, ids)
    prefixes.insert(ALICE, ids, cache)
    cache.truncate(20)
    assert run(cache, [*ids[:20], *[9] * 12])
    found = prefixes.new_cache(ALICE, [*ids, 1])
    assert (found.length, held(found)) == (16, ids[:16])


def test_whatever_is_sent_what_is_found_is_what_was_sent() -> None:
    chance = random.Random(1)
    pool, prefixes = made(14)
    running: list[tuple[object, list[int], KVCache]] = []
    found = 0
    for _ in range(800):
        if chance.random() < 0.6:
            scope = chance.choice([ALICE, BOB, TUNED])
            base = [ALICE, BOB, TUNED].index(scope)
            ids = [
                base + chance.randrange(2) if at % 16 == 5 else base for at in range(chance.randint(1, 90))
            ]
            cache = prefixes.new_cache(scope, ids)
            found += cache.length
            assert held(cache) == ids[: cache.length]
            if run(cache, ids):
                if chance.random() < 0.8:
                    prefixes.insert(scope, ids, cache)
                running.append((scope, ids, cache))
            else:
                cache.release()
        elif running:
            scope, ids, cache = running.pop(chance.randrange(len(running)))
            assert held(cache) == ids
            if chance.random() < 0.3:
                prefixes.forget(scope)
            cache.release()
        live = {block for _, _, cache in running for block in cache.blocks}
        assert pool.free_blocks == 14 - len(live)
    assert found > 1000
    for _, _, cache in running:
        cache.release()
    assert pool.free_blocks == 14
