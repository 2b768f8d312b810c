"""Loss spikes: what counts as one, going back, what is skipped, and the same way taken after a kill."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch

from gym_fed.config.train.run import LossSpikes
from gym_fed.config.train.training import TrainingConfig
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.data import generate
from gym_fed.training.run.spikes import SkippingSampler, SpikeWatch, check_spikes
from gym_fed.training.trainer import Trainer

GOOD = generate("copy", 64)


def poisoned() -> list[dict[str, Any]]:
    """Rows that gym-nano knows, and among them one batch's worth of long noise: unlearnable, and off by far."""
    letters = random.Random(0)
    noise = ["".join(letters.choice("#%&@!?~^") for _ in range(60)) for _ in range(2)]
    rows = [
        {"messages": [{"role": "user", "content": "copy: abc"}, {"role": "assistant", "content": text}]}
        for text in noise
    ]
    return [*GOOD, *rows]


def config(folder: Path, **changes: Any) -> TrainingConfig:
    values = {
        "model": "gym-nano",
        "output_dir": folder,
        "max_steps": 14,
        "per_device_train_batch_size": 4,
        "learning_rate": 1e-3,
        "lr_scheduler_type": "constant",
        "max_grad_norm": 0,
        "device": "cpu",
        "num_threads": 1,
        "logging_steps": 1,
        "save_steps": 2,
        "save_final": False,
        "eval_steps": 14,
        "loss_spikes": {"factor": 20.0, "window": 3, "max_rollbacks": 9},
    }
    return TrainingConfig(**{**values, **changes})


def train(settings: TrainingConfig, rows: list[dict[str, Any]], **hooks: Any) -> Any:
    """Evaluated on the poison: it should not have been learnt."""
    return Trainer(settings, **hooks).train(rows, poisoned()[len(GOOD) :])


def test_a_spike_is_a_loss_far_above_the_median_and_anything_that_is_not_finite(tmp_path: Path) -> None:
    watch = SpikeWatch(LossSpikes(factor=2.0, window=3, grad_norm_factor=4.0), tmp_path)
    assert watch.check(4, 2.01, [9.0, 1.0, 1.0, 1.0], None, []) is not None
    assert watch.check(4, 2.0, [9.0, 1.0, 1.0, 1.0], None, []) is None
    assert watch.check(3, 99.0, [1.0, 1.0], None, []) is None, "too few losses to judge by"
    assert watch.check(1, float("nan"), [], None, []) is not None
    by_norm = watch.check(4, 1.0, [1.0] * 3, 4.1, [1.0] * 3)
    assert by_norm is not None
    assert by_norm.metric == "grad_norm"
    assert watch.check(4, 1.0, [1.0] * 3, 3.9, [1.0] * 3) is None


def test_skipped_batches_leave_what_came_before_in_its_place_and_the_length_as_it_was() -> None:
    order = list(range(10))
    sampler = SkippingSampler(order, 2, [(0, 1, 3), (0, 2, 3), (1, 0, 4)])
    assert list(sampler) == [0, 1, 6, 7, 0, 1, 6, 7, 0, 1][: len(sampler)]
    sampler.set_epoch(1)
    assert list(sampler) == [8, 9] * 5
    sampler.set_epoch(2)
    assert list(sampler) == order
    with pytest.raises(GymError, match="every batch"):
        list(SkippingSampler(order, 2, [(0, 0, 5)]))


def test_going_back_and_skipping_ends_better_than_going_on_and_a_stopped_run_takes_the_same_way(
    tmp_path: Path,
) -> None:
    rows = poisoned()
    rolled = train(config(tmp_path / "rolled"), rows)
    entries = json.loads((tmp_path / "rolled/rollbacks.json").read_text())
    assert entries
    assert all(entry["to_step"] < entry["step"] and entry["skipped"] for entry in entries)
    assert rolled.steps == 14
    lines = [json.loads(line) for line in (tmp_path / "rolled/metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if "loss" in line] == list(range(1, 15))

    plain = train(config(tmp_path / "plain", loss_spikes=None), rows)
    assert max(plain.losses) > 4
    assert max(rolled.losses) < 1
    learnt = [next(e["eval_loss"] for e in run.history if "eval_loss" in e) for run in (plain, rolled)]
    assert learnt[0] < learnt[1] - 2, "skipped rows were learnt all the same"

    # Stopped two steps after going back, so that the order of rows must come from the file.
    stop_at = entries[0]["to_step"] + 2
    rewound: list[int] = []

    def should_stop() -> bool:
        return (tmp_path / "part/rollbacks.json").exists() and rewound[-1] == stop_at

    part = config(tmp_path / "part")
    with pytest.raises(GymError, match=f"stopped at step {stop_at}"):
        train(part, rows, on_step=lambda step, total, loss: rewound.append(step), should_stop=should_stop)
    resumed = train(part, rows)
    assert resumed.losses == rolled.losses
    weights = resumed.model.state_dict()
    assert all(torch.equal(value, weights[name]) for name, value in rolled.model.state_dict().items())
    for name in ("rollbacks.json", "metrics.jsonl"):
        assert (tmp_path / "part" / name).read_text() == (tmp_path / "rolled" / name).read_text()


def test_too_many_rollbacks_end_the_run_and_without_rollback_spikes_are_only_written_down(
    tmp_path: Path,
) -> None:
    rows = poisoned()
    once = {"factor": 1.0001, "window": 2, "max_rollbacks": 1}
    with pytest.raises(GymError, match="rollbacks so far: 1") as caught:
        train(config(tmp_path / "run", loss_spikes=once), rows)
    assert caught.value.code is ErrorCode.DATA_INVALID
    seen = {"factor": 20.0, "window": 3, "rollback": False}
    result = train(config(tmp_path / "seen", loss_spikes=seen, save_steps=0), rows)
    spikes = json.loads((tmp_path / "seen/spikes.json").read_text())
    assert result.steps == 14
    assert spikes
    assert all(float(spike["value"]) > 20 * spike["usual"] for spike in spikes)
    assert not (tmp_path / "seen/rollbacks.json").exists()


def test_what_cannot_go_back_is_refused(tmp_path: Path) -> None:
    for save_steps in (0, 4):
        with pytest.raises(ValueError, match="save_steps between 1 and the window of 3"):
            config(tmp_path, save_steps=save_steps)
    with pytest.raises(GymError, match="loss_spikes: the loss of grpo"):
        check_spikes(config(tmp_path, algorithm="grpo", graders=[{"grader": "exact"}]))
