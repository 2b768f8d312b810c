"""``streaming``: rows that are read while training, and runs that resume at the same row."""

from __future__ import annotations

import hashlib
import json
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from gym_fed.config.train.data_source import DataConfig
from gym_fed.config.train.training import TrainingConfig
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.data import generate
from gym_fed.data.row_stream import RowStream, StreamPosition
from gym_fed.training.trainer import Trainer


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Three files with 40 rows in all."""
    place = tmp_path / "shards"
    place.mkdir()
    rows = [{"text": f"{n} {row['messages'][-1]['content']}"} for n, row in enumerate(generate("copy", 40))]
    for index, part in enumerate((rows[:7], rows[7:25], rows[25:])):
        lines = "".join(json.dumps(row) + "\n" for row in part)
        (place / f"{index}.jsonl").write_text(lines)
    return place


def stream(folder: Path, **changes: Any) -> RowStream:
    values = {"seed": 0, "buffer_size": 6, "shuffle": True, **changes}
    return RowStream([DataConfig(path=str(folder))], "supervised", **values)


def texts(
    found: Any, count: int, start: StreamPosition | None = None
) -> list[tuple[StreamPosition, list[str]]]:
    blocks = islice(found.blocks(start or StreamPosition()), count)
    return [(position, [row["text"] for row in rows]) for position, rows in blocks]


@pytest.mark.parametrize("buffer_size", [1, 6, 7, 40, 100])
def test_an_epoch_has_every_row_once_and_the_next_another_order(folder: Path, buffer_size: int) -> None:
    per_epoch = -(-40 // buffer_size)
    blocks = texts(stream(folder, buffer_size=buffer_size), 2 * per_epoch)
    first, second = (
        [text for _, rows in part for text in rows] for part in (blocks[:per_epoch], blocks[per_epoch:])
    )
    assert len(set(first)) == len(first) == 40
    assert sorted(first) == sorted(second)
    assert buffer_size == 1 or first != second  # three files alone have few orders
    assert [position.epoch for position, _ in blocks] == [0] * per_epoch + [1] * per_epoch


@pytest.mark.parametrize("buffer_size", [1, 6, 7, 40, 100])
def test_reading_from_any_position_gives_the_blocks_that_followed_it(folder: Path, buffer_size: int) -> None:
    blocks = texts(stream(folder, buffer_size=buffer_size), 16)
    for index, (position, _) in enumerate(blocks[:8]):
        assert texts(stream(folder, buffer_size=buffer_size), 8, position) == blocks[index : index + 8]


def test_without_shuffling_the_order_is_that_of_the_files(folder: Path) -> None:
    rows = [text for _, block in texts(stream(folder, shuffle=False), 7) for text in block]
    assert [text.split()[0] for text in rows] == [str(n) for n in range(40)]


def test_a_file_that_became_shorter_is_refused_by_name(folder: Path) -> None:
    position = texts(stream(folder, shuffle=False), 5)[-1][0]
    assert (position.shard, position.row) == (1, 17)
    (folder / "1.jsonl").write_text('{"text": "a"}\n')
    with pytest.raises(GymError, match=r"1\.jsonl has fewer rows than the 17 rows"):
        texts(stream(folder, shuffle=False), 1, position)


def config(tmp_path: Path, folder: Path, name: str, **changes: Any) -> TrainingConfig:
    values: dict[str, Any] = {
        "algorithm": "pretrain",
        "model": "gym-nano",
        "data": [{"path": str(folder)}],
        "streaming": True,
        "buffer_size": 16,
        "max_length": 24,
        "max_steps": 12,
        "save_steps": 5,
        "per_device_train_batch_size": 2,
        "learning_rate": 1e-3,
        "neftune_noise_alpha": 5.0,  # noise of torch's random state, which a resume has to restore
        "device": "cpu",
        "num_threads": 1,
        "save_final": False,
        "output_dir": tmp_path / name,
    }
    return TrainingConfig(**{**values, **changes})


def digest(model: Any) -> str:
    parts = [value.detach().numpy().tobytes() for _, value in sorted(model.state_dict().items())]
    return hashlib.sha256(b"".join(parts)).hexdigest()


@pytest.mark.parametrize(
    "changes",
    [
        {"max_steps": 30},
        pytest.param({"packing": False}, marks=pytest.mark.slow),
        pytest.param({"packing": "bfd"}, marks=pytest.mark.slow),
        {"gradient_accumulation_steps": 2, "buffer_size": 3},
    ],
)
def test_a_run_that_was_stopped_ends_with_the_weights_of_one_that_was_not(
    tmp_path: Path, folder: Path, changes: dict[str, Any]
) -> None:
    whole = Trainer(config(tmp_path, folder, "whole", **changes)).train()
    steps: list[int] = []
    stopped = Trainer(
        config(tmp_path, folder, "parts", **changes),
        on_step=lambda step, total, loss: steps.append(step),
        should_stop=lambda: steps[-1:] == [7],
    )
    with pytest.raises(GymError) as caught:
        stopped.train()
    assert caught.value.code is ErrorCode.INTERRUPTED
    assert (tmp_path / "parts/checkpoints/checkpoint-7/stream.json").is_file()
    resumed = Trainer(config(tmp_path, folder, "parts", **changes)).train()
    assert digest(resumed.model) == digest(whole.model)
    assert resumed.rows == whole.rows
    assert whole.rows.rows > 40 or "max_steps" not in changes  # more than an epoch


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"eval_split": 2}, "eval_split needs all rows before the first step"),
        ({"max_steps": None}, "the number of rows is not known"),
        ({"group_by_length": True}, "group_by_length needs all rows"),
        ({"save_strategy": "epoch", "save_steps": 0}, "save_strategy is epoch, but a stream has no epochs"),
        ({"eval_strategy": "epoch"}, "eval_strategy is epoch, but a stream has no epochs"),
        ({"tokenized_path": "tokens"}, "tokenized_path needs all rows"),
        ({"algorithm": "dpo", "neftune_noise_alpha": None}, "dpo needs all rows before the first step"),
        ({"data": [{"path": "rows.jsonl", "weight": 1.5}]}, "weight 1.5 needs all rows"),
    ],
)
def test_what_needs_all_rows_is_refused_by_name(
    tmp_path: Path, folder: Path, changes: dict[str, Any], problem: str
) -> None:
    with pytest.raises(GymError, match=f"streaming: {problem}"):
        Trainer(config(tmp_path, folder, "run", **changes))
    assert not (tmp_path / "run").exists()


def test_rows_that_are_passed_are_refused(tmp_path: Path, folder: Path) -> None:
    with pytest.raises(GymError, match="streaming: rows are passed"):
        Trainer(config(tmp_path, folder, "run")).train([{"text": "a"}])
