"""Eviction of variants: least frequently used first, ties by recency."""

from __future__ import annotations

from collections import OrderedDict

import numpy as np

from gym_fed.serving.forward.variant_weights import LoadedVariant
from gym_fed.serving.store.records import VariantRecord
from gym_fed.serving.store.resident import HALVED_SECONDS, ResidentFiles, UseCounts


def record(name: str) -> VariantRecord:
    return VariantRecord(name, "ann", name * 8, 1, "base", "sha256:0", 1, 0, 0, None, "")


def use(files: ResidentFiles, name: str) -> bool:
    """One request of a variant of one byte; returns whether it had to be loaded."""
    found, missed = files.claim(record(name), "ann"), False
    if found is None:
        missed = True
        assert files.make_room(1, "ann", urgent=True)
        files.put(record(name), LoadedVariant(name, name * 8, {}, 1), "ann", awaited=True)
        found = files.claim(record(name), "ann")
    assert found is not None
    files.unpin(found)
    return missed


def test_a_variant_that_is_used_often_outlives_many_that_are_used_once() -> None:
    files = ResidentFiles(3)
    for _ in range(3):
        use(files, "often")
    for number in range(20):
        assert use(files, f"once-{number}")
    assert not use(files, "often")


def test_of_variants_that_were_used_as_often_the_oldest_goes() -> None:
    files = ResidentFiles(2)
    for name in ("a", "b", "a", "b", "c"):
        use(files, name)
    assert sorted(files.names) == ["b", "c"]


def test_what_was_popular_once_makes_room_in_the_end() -> None:
    files = ResidentFiles(2)
    for _ in range(500):
        use(files, "old")
    for number in range(12_000):
        use(files, f"new-{number % 2}")
    assert sorted(files.names) == ["new-0", "new-1"]


def test_counts_of_files_that_are_gone_are_forgotten() -> None:
    counts = UseCounts()
    for number in range(50_500):
        counts.note(f"{number}", in_memory=10)
    assert len(counts) <= 2500
    assert counts["0"] == 0
    assert counts["50499"] == 1


def test_requests_by_zipf_s_law_need_fewer_loads_than_by_recency_alone() -> None:
    weights = 1 / np.arange(1, 401)
    names = [str(one) for one in np.random.default_rng(0).choice(400, 6000, p=weights / weights.sum())]
    files, recent = ResidentFiles(60), OrderedDict[str, None]()
    ours = by_recency = 0
    for at, name in enumerate(names):
        missed = use(files, name)
        hit = name in recent
        recent[name] = None
        recent.move_to_end(name)
        if len(recent) > 60:
            recent.popitem(last=False)
        if at >= 3000:
            ours, by_recency = ours + missed, by_recency + (not hit)
    best = float(weights[60:].sum() / weights.sum()) * 3000
    assert best < ours < 0.85 * by_recency


def test_what_one_caller_used_often_makes_room_within_an_hour_of_few_requests() -> None:
    clock = [0.0]
    files = ResidentFiles(10)
    files._uses = UseCounts(lambda: clock[0])
    for number in range(20_000):
        use(files, f"greedy-{number % 9}")
    misses = []
    for number in range(120):
        clock[0] += 60
        misses.append(use(files, f"honest-{number % 5}"))
    assert sum(misses[:20]) > 10
    assert sum(misses[60:]) == 0


def test_counts_age_by_the_time_that_went_by() -> None:
    clock = [0.0]
    counts = UseCounts(lambda: clock[0])
    for _ in range(900):
        counts.note("often", 1)
    clock[0] += 3 * HALVED_SECONDS + 1
    counts.note("other", 1)
    assert counts["often"] == 900 / 8
    clock[0] += 1e9
    counts.note("other", 1)
    assert (counts["often"], counts["other"]) == (0.0, 1.0)
