"""Garbage collection while libraries are imported and a model is loaded."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path

import pytest

from gym_fed.base import models
from gym_fed.base.models import load_model
from gym_fed.core.library_env import without_collection


def test_no_collection_runs_while_a_model_is_loaded_and_collections_run_afterwards(
    tiny_base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    enabled: list[bool] = []
    load_weights = models.load_weights

    def load(*arguments: object, **options: object) -> object:
        enabled.append(gc.isenabled())
        return load_weights(*arguments, **options)

    monkeypatch.setattr(models, "load_weights", load)
    load_model(str(tiny_base))
    assert enabled == [False]
    assert gc.isenabled()


def test_only_a_block_that_freezes_exempts_its_objects_and_an_inner_one_leaves_the_outer_in_force() -> None:
    gc.unfreeze()
    with without_collection():
        with without_collection():
            pass
        assert not gc.isenabled()
    assert gc.isenabled()
    assert gc.get_freeze_count() == 0
    with without_collection(freeze=True):
        kept: list[list[int]] = [[] for _ in range(1000)]
    assert gc.get_freeze_count() >= len(kept)
    gc.unfreeze()


def test_a_model_that_is_dropped_is_freed(tiny_base: Path) -> None:
    loaded = load_model(str(tiny_base))
    model = weakref.ref(loaded.model)
    del loaded
    gc.collect()
    assert model() is None


def test_collections_run_again_after_a_model_that_cannot_be_loaded(tmp_path: Path) -> None:
    with pytest.raises(Exception, match="none"):
        load_model(str(tmp_path / "none"))
    assert gc.isenabled()
