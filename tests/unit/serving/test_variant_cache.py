"""The cache of variants: eviction, pins, one load per variant, and errors for every waiter."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest

from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.serving.forward.variant_weights import LoadedVariant
from gym_fed.serving.store import variant_cache
from gym_fed.serving.store.records import VariantRecord
from gym_fed.serving.store.variant_cache import VariantCache
from tests.support.wait import SECONDS


def row(name: str, size: int = 10, revision: int = 1) -> VariantRecord:
    sha256 = f"{name}{revision}"
    return VariantRecord(name, "ann", sha256, size, "base", "sha256:0", revision, 0, 0, None, "")


class Loads:
    """A loader that can be held up, can fail, and records the requested variants."""

    def __init__(self) -> None:
        self.requested: list[str] = []
        self.sizes: dict[str, int] = {}
        self.errors: dict[str, Exception] = {}
        self.gate = threading.Event()
        self.gate.set()

    def __call__(self, record: VariantRecord, shared: LoadedVariant | None) -> LoadedVariant:
        self.requested.append(record.name)
        assert self.gate.wait(SECONDS)
        if record.name in self.errors:
            raise self.errors[record.name]
        return shared or LoadedVariant(
            record.name, record.sha256, {}, self.sizes.get(record.name, record.size_bytes)
        )


@pytest.fixture
def loads() -> Loads:
    return Loads()


@pytest.fixture
def cache(loads: Loads) -> Iterator[VariantCache]:
    found = VariantCache(loads, 30)
    yield found
    loads.gate.set()
    found.close()


def use(cache: VariantCache, *names: str) -> None:
    for name in names:
        variant = cache.acquire(row(name))
        assert variant is not None
        cache.release(variant)


def wait_for(what: Callable[[], object]) -> None:
    end = time.monotonic() + SECONDS
    while not what():
        assert time.monotonic() < end
        time.sleep(0.002)


def test_the_least_recently_used_goes_first(cache: VariantCache, loads: Loads) -> None:
    use(cache, "a", "b", "c", "a", "d")
    assert cache._resident.names == ["c", "a", "d"]
    use(cache, "c", "a", "d")
    assert loads.requested == ["a", "b", "c", "d"]
    stats = cache.stats()
    assert (stats.resident, stats.resident_bytes, stats.evictions) == (3, 30, 1)
    assert (stats.hits, stats.misses, stats.loads) == (4, 4, 4)


def test_what_is_in_use_stays_and_the_next_waits_for_room(cache: VariantCache) -> None:
    pinned = [cache.acquire(row(name)) for name in "abc"]
    assert cache.poll(row("d")) is None
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(cache.acquire, row("d"))
        time.sleep(0.05)
        assert cache.poll(row("d")) is None
        assert not waiting.done()
        assert cache.stats().resident_bytes == 30
        assert pinned[1] is not None
        cache.release(pinned[1])
        assert waiting.result(SECONDS) is not None
    assert sorted(cache._resident.names) == ["a", "c", "d"]


def test_a_variant_is_loaded_once_for_all_who_want_it(cache: VariantCache, loads: Loads) -> None:
    loads.gate.clear()
    with ThreadPoolExecutor(8) as pool:
        waiting = [pool.submit(cache.acquire, row("a")) for _ in range(8)]
        wait_for(lambda: loads.requested)
        assert cache.poll(row("a")) is None
        loads.gate.set()
        assert len({found.result(SECONDS) for found in waiting}) == 1
    assert loads.requested == ["a"]
    assert cache.stats().pinned == 1


def test_three_variants_take_turns_in_a_cache_for_two(loads: Loads) -> None:
    cache, done = VariantCache(loads, 20), set()
    end = time.monotonic() + SECONDS
    while len(done) < 3:
        assert time.monotonic() < end
        for name in "abc":
            if name not in done and (found := cache.poll(row(name))) is not None:
                done.add(name)
                cache.release(found)
        time.sleep(0.001)
    assert sorted(loads.requested) == ["a", "b", "c"]  # none was evicted before its use
    cache.close()


def test_prefetch_fills_free_room_and_takes_none_from_another_prefetch(
    cache: VariantCache, loads: Loads
) -> None:
    for name in "abcd":  # one after another: of those that two threads load at once, either may be first
        cache.prefetch(row(name))
        wait_for(lambda: not cache.stats().loading)
    assert sorted(cache._resident.names) == ["a", "b", "c"]
    use(cache, "a")
    assert (cache.stats().hits, cache.stats().misses) == (1, 0)
    cache.prefetch(row("a"))
    cache.prefetch(row("d"))
    wait_for(lambda: "d" in cache._resident.names)
    assert "a" not in cache._resident.names  # used already, and nobody uses it now
    assert loads.requested.count("a") == 1


def test_what_is_prefetched_gives_way_to_what_a_request_waits_for(cache: VariantCache) -> None:
    for name in "abc":  # one after another: two threads load, and what came first goes first
        cache.prefetch(row(name))
        wait_for(lambda: not cache.stats().loading)
    use(cache, "d")
    assert sorted(cache._resident.names) == ["b", "c", "d"]


def test_what_is_asked_for_overtakes_what_is_prefetched(loads: Loads) -> None:
    cache = VariantCache(loads, 1000, threads=1)
    loads.gate.clear()
    for name in "abcde":
        cache.prefetch(row(name))
    wait_for(lambda: loads.requested)
    assert cache.poll(row("e")) is None
    loads.gate.set()
    wait_for(lambda: not cache.stats().loading)
    assert loads.requested == ["a", "e", "b", "c", "d"]
    cache.close()


def test_an_error_reaches_all_who_wait_and_is_forgotten(
    cache: VariantCache, loads: Loads, monkeypatch: pytest.MonkeyPatch
) -> None:
    loads.errors["a"] = GymError(ErrorCode.HASH_MISMATCH, "a is damaged")
    loads.gate.clear()
    with ThreadPoolExecutor(4) as pool:
        waiting = [pool.submit(cache.acquire, row("a")) for _ in range(4)]
        wait_for(lambda: loads.requested)
        time.sleep(0.02)
        loads.gate.set()
        errors = [found.exception(20) for found in waiting]
    assert [str(error) for error in errors] == ["a is damaged"] * 4
    assert len({id(error) for error in errors}) == 4
    for _ in range(2):  # requests that only poll get the error, too
        with pytest.raises(GymError, match="damaged"):
            cache.poll(row("a"))
    cache.prefetch(row("a"))
    assert not cache.stats().loading
    assert loads.requested == ["a"]
    loads.errors.clear()
    monkeypatch.setattr(variant_cache.time, "monotonic", lambda later=time.monotonic() + 60: later)
    use(cache, "a")
    assert cache.stats().errors == 1


def test_a_failure_is_not_reported_for_another_row_or_file(loads: Loads) -> None:
    file = ["old"]
    cache = VariantCache(loads, 30, fingerprint=lambda record: file[0])
    loads.errors["a"] = GymError(ErrorCode.HASH_MISMATCH, "a is damaged")
    for _ in range(2):
        with pytest.raises(GymError, match="damaged"):
            cache.acquire(row("a"))
    loads.errors.clear()
    file[0] = "new"
    use(cache, "a")
    assert loads.requested == ["a", "a"]
    cache.close()


def test_a_defect_of_the_loader_is_reported_and_the_next_load_goes_on(
    cache: VariantCache, loads: Loads
) -> None:
    loads.errors["a"] = ZeroDivisionError("oh")
    with pytest.raises(GymError, match="ZeroDivisionError: oh") as caught:
        cache.acquire(row("a"))
    assert caught.value.code is ErrorCode.INTERNAL
    use(cache, "b", "c")


def test_a_variant_larger_than_the_cache_is_refused_with_both_sizes(
    cache: VariantCache, loads: Loads
) -> None:
    loads.sizes["a"] = 31
    with pytest.raises(GymError, match="31 bytes of memory, but cache_size is 30") as caught:
        cache.acquire(row("a"))
    assert caught.value.code is ErrorCode.TOO_LARGE
    assert cache.stats().resident_bytes == 0


def test_a_variant_larger_than_its_file_waits_for_what_it_takes(cache: VariantCache, loads: Loads) -> None:
    loads.sizes["big"] = 25
    pinned = cache.acquire(row("a"))
    assert pinned is not None
    assert cache.poll(row("big")) is None
    wait_for(lambda: loads.requested == ["a", "big"])
    time.sleep(0.02)
    assert cache.poll(row("big")) is None
    assert cache.stats().resident_bytes == 10
    cache.release(pinned)
    use(cache, "big")
    assert cache._resident.names == ["big"]


def test_a_variant_replaced_while_it_is_loading_is_not_handed_out(cache: VariantCache, loads: Loads) -> None:
    loads.gate.clear()
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(cache.acquire, row("a"))
        wait_for(lambda: loads.requested)
        assert cache.poll(row("a", revision=2)) is None
        assert waiting.result(SECONDS) is None  # look the row up again
        loads.gate.set()
        found = cache.acquire(row("a", revision=2))
    assert found is not None
    assert found.delta_sha256 == "a2"
    wait_for(lambda: len(loads.requested) == 2)
    assert cache.stats().resident == 1


def test_close_ends_every_wait(loads: Loads) -> None:
    cache = VariantCache(loads, 10)
    pinned = cache.acquire(row("a"))
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(cache.acquire, row("b"))
        wait_for(lambda: cache.stats().loading)
        cache.close()
        with pytest.raises(GymError, match="closed"):
            waiting.result(SECONDS)
    with pytest.raises(GymError, match="closed"):
        cache.poll(row("a"))
    assert pinned is not None


def test_threads_that_use_many_variants_never_exceed_the_cache(loads: Loads) -> None:
    cache, highest = VariantCache(loads, 50), []

    def work(seed: int) -> None:
        for turn in range(40):
            wanted = row(f"v{(seed * 7 + turn * 3) % 11}")
            while (
                variant := cache.acquire(wanted)
            ) is None:  # evicted after another's use, before this one's
                pass
            highest.append(cache.stats().resident_bytes)
            cache.release(variant)

    with ThreadPoolExecutor(4) as pool:
        for future in [pool.submit(work, seed) for seed in range(4)]:
            future.result(SECONDS)
    assert max(highest) == 50
    assert cache.stats().pinned == 0
    cache.close()


def test_a_row_that_breaks_the_loading_itself_ends_that_load_and_no_thread(loads: Loads) -> None:
    cache = VariantCache(loads, 30, threads=1)
    for name in ("a", "b"):
        broken = row(name, size="x")  # type: ignore[arg-type]
        with pytest.raises(GymError) as caught:
            cache.acquire(broken)
        assert caught.value.code is ErrorCode.INTERNAL
    use(cache, "c")
    assert loads.requested == ["c"]
    assert cache.stats().errors == 2
    cache.close()


def test_a_load_that_takes_long_does_not_lack_room_and_one_that_finds_none_does(
    cache: VariantCache, loads: Loads
) -> None:
    held = [cache.acquire(row(name)) for name in "ab"]
    loads.gate.clear()
    assert cache.poll(row("slow")) is None
    wait_for(lambda: "slow" in loads.requested)
    assert not cache.lacks_room("slow")
    assert cache.poll(row("late")) is None
    wait_for(lambda: cache.lacks_room("late"))
    assert held[0] is not None
    cache.release(held[0])
    wait_for(lambda: not cache.lacks_room("late"))
    loads.gate.set()
    wait_for(lambda: cache.poll(row("late")))


def copy_of(name: str, other: VariantRecord) -> VariantRecord:
    """Another's row with the same file."""
    return replace(other, name=name, owner="bob")


def test_variants_with_the_same_file_share_its_weights(cache: VariantCache, loads: Loads) -> None:
    first = cache.acquire(row("a"))
    second = cache.acquire(copy_of("b", row("a")))
    assert first is second is not None
    assert loads.requested == ["a", "b"]  # each row is verified
    stats = cache.stats()
    assert (stats.resident, stats.resident_bytes, stats.loads, stats.pinned) == (1, 10, 1, 1)
    cache.release(first)
    assert cache.stats().pinned == 1
    cache.release(first)
    assert cache.stats().pinned == 0
    with pytest.raises(GymError, match="more often"):
        cache.release(first)


def test_rows_that_load_the_same_file_at_once_load_it_once(loads: Loads) -> None:
    cache = VariantCache(loads, 30, threads=4)
    loads.gate.clear()
    rows = [row("a"), *(copy_of(name, row("a")) for name in "bcd")]
    with ThreadPoolExecutor(4) as pool:
        waiting = [pool.submit(cache.acquire, one) for one in rows]
        wait_for(lambda: cache.stats().loading == 4)
        wait_for(lambda: loads.requested)
        assert cache.poll(row("z")) is None  # another file goes before the rows that wait for the first
        wait_for(lambda: "z" in loads.requested)
        assert len(loads.requested) == 2
        loads.gate.set()
        assert len({found.result(SECONDS) for found in waiting}) == 1
    assert cache.stats().loads == 2
    assert sorted(loads.requested) == ["a", "b", "c", "d", "z"]
    cache.close()


def test_a_row_that_is_refused_gets_no_weights_of_another_with_the_same_file(
    cache: VariantCache, loads: Loads
) -> None:
    use(cache, "a")
    loads.errors["b"] = GymError(ErrorCode.SIGNATURE_INVALID, "b is not signed")
    with pytest.raises(GymError, match="not signed"):
        cache.acquire(copy_of("b", row("a")))
    with pytest.raises(GymError, match="not signed"):
        cache.poll(copy_of("b", row("a")))
    assert cache.stats().pinned == 0
    use(cache, "a")
    assert cache.stats().loads == 1


def test_a_file_stays_until_the_last_name_that_may_use_it_is_removed(
    cache: VariantCache, loads: Loads
) -> None:
    use(cache, "a")
    cache.release(found := cache.acquire(copy_of("b", row("a"))))  # type: ignore[arg-type]
    cache.retire("a")
    assert cache.acquire(copy_of("b", row("a"))) is found
    cache.retire("b")
    assert cache.stats().resident == 1  # in use
    cache.release(found)  # type: ignore[arg-type]
    assert (cache.stats().resident, cache.stats().resident_bytes) == (0, 0)
    use(cache, "a")
    assert cache.stats().loads == 2


def test_a_file_in_memory_is_not_evicted_while_another_row_of_it_is_verified(
    cache: VariantCache, loads: Loads
) -> None:
    use(cache, "a", "b", "c")
    loads.gate.clear()
    assert cache.poll(copy_of("copy", row("a"))) is None
    wait_for(lambda: "copy" in loads.requested)
    assert cache.poll(row("d")) is None
    wait_for(lambda: "d" in loads.requested)
    assert cache._resident.names == ["a", "c"]  # b made room, although a was used before it
    loads.gate.set()
    wait_for(lambda: cache.poll(copy_of("copy", row("a"))))
    assert loads.requested.count("a") == 1


def test_a_name_that_gets_another_file_leaves_the_shared_one_to_the_others(
    cache: VariantCache, loads: Loads
) -> None:
    use(cache, "a")
    cache.release(shared := cache.acquire(copy_of("b", row("a"))))  # type: ignore[arg-type]
    own = cache.acquire(row("b", revision=2))
    assert own is not None
    assert own.delta_sha256 == "b2"
    assert cache.acquire(row("a")) is shared
    assert cache.stats().resident_bytes == 20


def used_by(cache: VariantCache, user: str, *names: str) -> None:
    for name in names:
        found: list[LoadedVariant] = []
        wait_for(
            lambda name=name, found=found: (one := cache.poll(row(name), user)) and not found.append(one)
        )  # type: ignore[misc]
        cache.release(found[0])


def test_a_user_with_more_than_its_share_replaces_its_own_variants(cache: VariantCache, loads: Loads) -> None:
    used_by(cache, "ann", "a")
    used_by(cache, "bob", *"bcdefg", *"fgfgfg")
    assert sorted(cache._resident.names) == ["a", "f", "g"]
    used_by(cache, "bob", "h")
    assert "a" in cache._resident.names
    used_by(cache, "ann", "a")
    assert loads.requested.count("a") == 1
    used_by(cache, "cleo", "x")  # bob has two of three
    assert {"a", "x"} < set(cache._resident.names)


def test_a_user_alone_has_the_whole_cache_and_a_large_variant_still_fits(
    cache: VariantCache, loads: Loads
) -> None:
    used_by(cache, "bob", *"abc")
    assert sorted(cache._resident.names) == ["a", "b", "c"]
    used_by(cache, "ann", "x")
    loads.sizes["big"] = 30
    used_by(cache, "ann", "big")
    assert cache._resident.names == ["big"]
