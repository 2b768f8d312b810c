"""Rows grouped by length: batches of like rows, another order each epoch, and the same one after a resume."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from gym_fed.base.models import load_model
from gym_fed.config.train.training import TrainingConfig
from gym_fed.core.errors import GymError
from gym_fed.data import generate
from gym_fed.training.trainer import Trainer

ROWS = generate("copy", 12)


@pytest.mark.parametrize("stop", [4, 5])
def test_a_run_stopped_in_its_second_epoch_goes_on_in_the_same_order(
    tiny_base: Path, tmp_path: Path, stop: int
) -> None:
    def train(folder: str, **hooks: Any) -> Any:
        loaded = load_model(str(tiny_base))
        settings = TrainingConfig(
            output_dir=tmp_path / folder,
            max_steps=8,  # three an epoch
            per_device_train_batch_size=4,
            group_by_length=True,
            max_length=64,
            device="cpu",
            num_threads=1,
            save_final=False,
        )
        return Trainer(settings, model=loaded.model, tokenizer=loaded.tokenizer, **hooks).train(ROWS)

    whole = train("whole")
    seen: list[int] = []
    with pytest.raises(GymError, match=f"stopped at step {stop}"):
        train(
            "part",
            on_step=lambda step, total, loss: seen.append(step),
            should_stop=lambda: len(seen) == stop,
        )
    resumed = train("part")
    assert resumed.losses == whole.losses
    ours, theirs = resumed.model.state_dict(), whole.model.state_dict()
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def test_the_order_is_of_the_seed_and_the_epoch() -> None:
    from transformers.trainer_pt_utils import LengthGroupedSampler

    from gym_fed.training.trl_glue import EpochLengthGroups

    lengths = [length for length in (5, 50, 500) for _ in range(64)]

    def order(seed: int, epoch: int) -> list[int]:
        sampler = EpochLengthGroups(LengthGroupedSampler(4, lengths=lengths), seed)
        sampler.set_epoch(epoch)
        return list(sampler)

    torch.manual_seed(0)
    first = order(0, 1)
    torch.manual_seed(1)
    assert order(0, 1) == first
    assert order(0, 2) != first
    assert order(3, 1) != first
    assert sorted(first) == list(range(192))
    batches = [first[start : start + 4] for start in range(0, 192, 4)]
    like = [len({lengths[index] for index in batch}) == 1 for batch in batches]
    assert sum(like) > len(like) / 2, "most batches hold rows of one length; drawn at random, 1 in 28 would"
