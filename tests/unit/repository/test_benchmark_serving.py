"""The sides of `benchmarks/serving.py`: one that runs something else than it is named for is refused."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from gym_fed.delta.file import DeltaFile
from gym_fed.serving.engine.engine import Engine
from gym_fed.serving.forward.multi_variant import MultiVariantModel
from gym_fed.serving.store.store import VariantStore

BENCHMARKS = Path(__file__).resolve().parents[3] / "benchmarks"


@pytest.fixture(scope="module")
def scripts() -> Iterator[SimpleNamespace]:
    """``benchmarks`` is no package: its scripts find each other beside themselves."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(BENCHMARKS)
        names = ("_serving_models", "_serving_sides")
        yield SimpleNamespace(**{name.removeprefix("_serving_"): import_module(name) for name in names})
        for name in names:
            sys.modules.pop(name)


@pytest.fixture(scope="module")
def base(scripts: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    return scripts.models.synthetic(scripts.models.Sizes(64, 96, 2, 1, 128), tmp_path_factory.mktemp("base"))


@pytest.mark.parametrize("kernel", ["exact", "lookup"])
def test_a_side_that_runs_another_kernel_than_it_is_named_for_is_refused(
    scripts: Any, base: Any, tmp_path: Path, kernel: Any
) -> None:
    sides, twin = scripts.sides, scripts.models.twin(base.model)
    file = scripts.models.one_bit(base, tmp_path, 0)
    other = {"exact": "lookup", "lookup": "exact"}[kernel]
    load = sides.Load(1, 4, 3, 128)
    with MultiVariantModel(twin, kernel=kernel) as served:
        opening = VariantStore.open(
            tmp_path / "store", base=base.spec, layout=served.layout, require_signature=False
        )
        with opening as store, Engine(served, base.tokenizer, store) as engine:
            store.add(file, None, name="v0", owner="me")
            speeds = sides.Speeds()
            sides.EngineSide(engine, served, "v", kernel)(load, speeds)
            assert speeds.ran[kernel] == 8 * 3  # seven matrices and the head, the prompt and two more steps
            assert (speeds.ran[other], speeds.ran["rows with variants"]) == (0, 3)
            with pytest.raises(RuntimeError, match=f"the side of kernel {other} ran"):
                sides.EngineSide(engine, served, "v", other)(load, speeds)
            served.kernel = other  # type: ignore[attr-defined]  # nothing reads it
            with pytest.raises(RuntimeError, match=f"the side of kernel {other} ran"):
                sides.EngineSide(engine, served, "v", other)(load, speeds)
            with pytest.raises(RuntimeError, match="the side of kernel exact ran"):
                sides.EngineSide(engine, served, None, "exact")(load, speeds)


def test_swapping_is_refused_when_the_model_that_answers_is_not_the_merged_one(
    scripts: Any, base: Any, tmp_path: Path
) -> None:
    sides, file = scripts.sides, scripts.models.one_bit(base, tmp_path, 0)
    twin = scripts.models.twin(base.model)
    with (
        DeltaFile.open(file, base.spec) as delta,
        MultiVariantModel(twin) as served,
        Engine(served, base.tokenizer) as engine,
    ):
        side, load = sides.EngineSide(engine, served, None, None), sides.Load(2, 4, 2, 128)
        before = twin.lm_head.weight.clone()
        swap, speeds = sides.SwapSide(side, twin, [delta]), sides.Speeds()
        swap(load, speeds)
        assert speeds.ran["swaps"] == 2
        assert torch.equal(twin.lm_head.weight, before)
        swap._put = lambda weights: None
        with pytest.raises(RuntimeError, match="not the last merged model's"):
            swap(load, speeds)


def test_variants_that_do_nothing_are_found_by_their_logits(scripts: Any) -> None:
    logits = torch.tensor([[1.0, 2.0], [1.0, 3.0], [0.0, 1.0], [0.0, 1.25]])
    scripts.sides.require_distinct(logits, ["a", "b", "base", "base"])
    logits[1] = torch.tensor([0.25, 1.0])
    with pytest.raises(RuntimeError, match="base and b give the same logits"):
        scripts.sides.require_distinct(logits, ["a", "b", "base", "base"])
