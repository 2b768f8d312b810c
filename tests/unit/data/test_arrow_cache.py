"""The cache of Arrow files: an entry is valid when it is complete."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import IO

import pytest

from gym_fed.core.errors import GymError
from gym_fed.data.arrow_cache import ArrowCache, recipe_digest


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ArrowCache:
    monkeypatch.setenv("GYM_HOME", str(tmp_path))
    return ArrowCache(recipe_digest({"rows": 1}))


def written(sink: IO[bytes]) -> Iterator[int]:
    for number in range(3):
        sink.write(b"abc")
        yield number


def test_a_file_is_valid_after_the_last_item_with_its_facts(cache: ArrowCache) -> None:
    work = cache.fill(written, lambda: {"rows": 3})
    assert next(work) == 0
    assert not cache.is_filled()
    assert list(work) == [1, 2]
    assert cache.is_filled()
    assert cache.facts() == {"rows": 3}
    assert cache.path.read_bytes() == b"abc" * 3


def test_work_that_ends_early_leaves_nothing(cache: ArrowCache) -> None:
    work = cache.fill(written, dict)
    next(work)
    work.close()
    assert not cache.is_filled()
    assert list(cache.path.parent.iterdir()) == []


@pytest.mark.parametrize("harm", ["cut", "no index", "no index's end"])
def test_a_damaged_entry_is_written_again(cache: ArrowCache, harm: str) -> None:
    list(cache.fill(written, dict))
    index = cache.path.with_suffix(".json")
    if harm == "cut":
        cache.path.write_bytes(b"abc")
    elif harm == "no index":
        index.unlink()
    else:
        index.write_text(index.read_text()[:-5])
    assert not cache.is_filled()
    list(cache.fill(written, dict))
    assert cache.is_filled()


def test_a_source_that_changes_while_it_is_read_keeps_nothing(cache: ArrowCache) -> None:
    assert list(cache.fill(written, dict, lambda: "another digest")) == [0, 1, 2]
    assert not cache.is_filled()
    assert list(cache.path.parent.iterdir()) == []
    list(cache.fill(written, dict, lambda: cache.path.stem))
    assert cache.is_filled()


def test_changed_bytes_are_found_by_reading(cache: ArrowCache) -> None:
    list(cache.fill(written, dict))
    cache.require_intact()
    cache.path.write_bytes(b"abd" * 3)
    with pytest.raises(GymError, match="its bytes have changed"):
        cache.require_intact()


def test_other_recipes_have_other_names() -> None:
    assert recipe_digest({"rows": 1}) != recipe_digest({"rows": 2})
