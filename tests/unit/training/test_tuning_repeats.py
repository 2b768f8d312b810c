"""Tuning methods with one seed: the same weights every time, and from a run that was stopped on the way."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from gym_fed.core.errors import GymError
from gym_fed.training.trainer import Trainer
from tests.support.quick import quick
from tests.support.tuning_cases import CASES, METHODS, ROWS, config, train, weights

NAMES = [*METHODS, "pissa_niter_4", "lora_fa"]


@pytest.fixture(scope="module")
def whole_of(tiny_base: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Any]:
    runs: dict[str, Any] = {}

    def whole(name: str) -> Any:
        if name not in runs:
            folder = tmp_path_factory.mktemp("whole") / name
            runs[name] = train(tiny_base, folder, save_final=False, **CASES[name])
        return runs[name]

    return whole


@pytest.mark.parametrize("name", quick(NAMES, "full", "lora", "adalora", "pissa_niter_4"))
def test_a_stopped_run_ends_with_the_bits_of_one_that_was_not(
    whole_of: Callable[[str], Any], name: str, tiny_base: Path, tmp_path: Path
) -> None:
    settings = config(tmp_path / "run", model=str(tiny_base), save_final=False, **CASES[name])
    seen: list[int] = []
    stopped = Trainer(
        settings, on_step=lambda step, *_: seen.append(step), should_stop=lambda: len(seen) == 8
    )
    with pytest.raises(GymError, match="stopped at step 8"):
        stopped.train(ROWS)
    resumed = Trainer(settings).train(ROWS)
    assert resumed.losses == whole_of(name).losses
    whole = weights(whole_of(name).model)
    assert all(torch.equal(value, whole[key]) for key, value in weights(resumed.model).items())
