"""Rows of large files are read and encoded once, mapped afterwards, and learned as rows in memory are."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest

from gym_fed.base.models import load_tokenizer
from gym_fed.config.train.training import TrainingConfig
from gym_fed.core.errors import GymError
from gym_fed.core.registries import ALGORITHMS
from gym_fed.data import generate
from gym_fed.data.encoded_table import EncodedTable, is_encoded
from gym_fed.data.reading import load_rows
from gym_fed.data.source_store import stored_rows
from gym_fed.data.sources import source_rows
from gym_fed.training.rows import encode_part
from gym_fed.training.rows.run_rows import encode_run, rows_of_run
from gym_fed.training.trainer import Trainer
from tests.support.quick import quick

CHATS = [row for task in ("copy", "double", "reverse") for row in generate(task, 400)]
TEXTS = [{"text": row["messages"][-1]["content"] * (1 + i % 9)} for i, row in enumerate(CHATS)]
PAIRS = [
    {
        "prompt": row["messages"][:-1],
        "chosen": row["messages"][-1:],
        "rejected": [{"role": "assistant", "content": f"{row['messages'][-1]['content']}!"}],
    }
    for row in CHATS[:60]
]
RUNS: dict[str, tuple[list[dict[str, Any]], dict[str, Any]]] = {
    "sft": (CHATS, {}),
    "sft, packed": (CHATS, {"packing": True}),
    "sft, best fit": (CHATS, {"packing": "bfd"}),
    "pretrain": (TEXTS, {"algorithm": "pretrain"}),
    "pretrain, weighted, split": (TEXTS, {"algorithm": "pretrain", "weight": 1.5, "eval_split": 5}),
    "pretrain, not packed": (TEXTS, {"algorithm": "pretrain", "packing": False}),
    "dpo": (PAIRS, {"algorithm": "dpo"}),
    "simpo": (PAIRS, {"algorithm": "simpo"}),
    "reward_model": (PAIRS, {"algorithm": "reward_model"}),
}
RECORDED = {
    "sft": "7bbc5e051dda0b8b",
    "sft, packed": "3ef39e7da16764da",
    "sft, best fit": "2662f09065557444",
    "pretrain": "57591b8988cb169d",
    "pretrain, weighted, split": "0af4af4463163994",
    "pretrain, not packed": "4da36e7ba553123e",
    "dpo": "7490f5fee8f7275f",
    "simpo": "0434fcc57c4353e1",
    "reward_model": "98ecef62bbe41f1f",
}
"""First 16 digits of the SHA-256 of the encoded rows, recorded when all of them were lists in memory."""


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("GYM_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


@pytest.fixture
def every_file_is_large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gym_fed.data.source_store.MAX_MEMORY_BYTES", 0)


def config(tmp_path: Path, rows: list[dict[str, Any]], **changes: Any) -> TrainingConfig:
    file = tmp_path / "rows.jsonl"
    if not file.exists():
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    source = {"path": str(file), "weight": changes.pop("weight", 1.0)}
    values = {"model": "gym-nano", "data": [source], "output_dir": tmp_path / "run", "max_length": 64}
    run = {"max_steps": 5, "per_device_train_batch_size": 2, "device": "cpu", "num_threads": 1}
    return TrainingConfig(**{**values, **run, "save_final": False, "learning_rate": 1e-3, **changes})


def encoded(settings: TrainingConfig) -> Any:
    rows = rows_of_run(settings, None, None)
    return encode_run(settings, ALGORITHMS.new(settings.algorithm), load_tokenizer("gym-nano"), *rows)


def digest(rows: Any) -> str:
    return hashlib.sha256("".join(json.dumps(row, sort_keys=True) for row in rows).encode()).hexdigest()


def weights(settings: TrainingConfig, dataset: Any = None) -> str:
    model = Trainer(settings).train(dataset).model
    parts = [value.detach().numpy().tobytes() for _, value in sorted(model.state_dict().items())]
    return hashlib.sha256(b"".join(parts)).hexdigest()


@pytest.mark.parametrize("name", RUNS)
@pytest.mark.usefixtures("every_file_is_large")
def test_encoded_rows_are_those_that_were_recorded(tmp_path: Path, name: str) -> None:
    rows, changes = RUNS[name]
    settings = config(tmp_path, rows, **changes)
    first, again = encoded(settings), encoded(settings)
    assert isinstance(again.encoded, EncodedTable)
    assert [row for row in again.encoded] == [again.encoded[i] for i in range(len(again.encoded))]
    assert digest(first.encoded)[:16] == digest(again.encoded)[:16] == RECORDED[name]
    assert again.counts == first.counts
    assert again.digests == first.digests


@pytest.mark.parametrize(
    "name", quick(["sft", "sft, best fit", "pretrain, weighted, split", "dpo"], "sft, best fit", "dpo")
)
def test_mapped_rows_give_the_weights_of_rows_in_memory(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows, changes = RUNS[name]
    settings = config(tmp_path, rows, **changes)
    algorithm = ALGORITHMS.type_of(settings.algorithm)
    with monkeypatch.context() as patch:  # lists of ids, and a data set of them
        patch.setattr(algorithm, "encode_each", lambda *arguments: None)
        in_memory = weights(settings.model_copy(update={"output_dir": tmp_path / "memory"}))
    monkeypatch.setattr("gym_fed.data.source_store.MAX_MEMORY_BYTES", 0)
    assert weights(settings) == in_memory
    assert weights(settings.model_copy(update={"output_dir": tmp_path / "again"})) == in_memory


@pytest.mark.usefixtures("every_file_is_large")
def test_a_second_start_neither_reads_nor_encodes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = config(tmp_path, CHATS, packing=True)
    first = encoded(settings)
    said = capsys.readouterr().err
    assert "trains on the prompts" in said
    with monkeypatch.context() as patch:
        patch.setattr("gym_fed.data.source_store.source_rows", lambda *a: pytest.fail("read again"))
        patch.setattr(encode_part, "rows_to_encode", lambda *a: pytest.fail("encoded again"))
        again = encoded(settings)
        encoded(settings.model_copy(update={"learning_rate": 1.0, "output_dir": tmp_path / "b"}))
        with pytest.raises(pytest.fail.Exception, match="encoded again"):
            encoded(settings.model_copy(update={"max_length": 32}))
        with pytest.raises(pytest.fail.Exception, match="read again"):
            encoded(config(tmp_path, CHATS, algorithm="grpo"))
    assert again.encoded == first.encoded
    assert again.counts.facts() == first.counts.facts()
    assert "trains on the prompts" in capsys.readouterr().err


@pytest.mark.parametrize("kind", ["rows", "encoded rows"])
@pytest.mark.usefixtures("every_file_is_large")
def test_damaged_files_of_the_cache_are_written_again(
    tmp_path: Path, home: Path, kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = config(tmp_path, CHATS)
    fresh = encoded(settings)
    files = {is_encoded(file): file for file in home.rglob("*.arrow")}
    file = files[kind == "encoded rows"]
    written = file.read_bytes()
    middle = len(written) // 2
    file.write_bytes(written[:middle] + bytes(64) + written[middle + 64 :])
    capsys.readouterr()
    again = encoded(settings)
    said = "".join(capsys.readouterr().err.split())  # the console wraps lines
    assert said.count("itsbyteshavechanged") == 1
    assert f"{file}:itsbyteshavechanged" in said
    assert again.encoded == fresh.encoded
    assert again.digests == fresh.digests
    assert file.read_bytes() == written


@pytest.mark.usefixtures("every_file_is_large")
def test_damaged_rows_of_a_source_are_read_again(tmp_path: Path, home: Path) -> None:
    source = config(tmp_path, CHATS).data[0]
    fresh = list(stored_rows(source))
    (file,) = home.rglob("*.arrow")
    written = file.read_bytes()
    file.write_bytes(written.replace(b"user", b"uter"))
    assert list(stored_rows(source)) == fresh
    assert file.read_bytes() == written


@pytest.mark.usefixtures("every_file_is_large")
def test_a_changed_file_is_read_again(tmp_path: Path) -> None:
    settings = config(tmp_path, CHATS)
    before = encoded(settings)
    file = tmp_path / "rows.jsonl"
    lines = file.read_text().splitlines(keepends=True)
    file.write_text("".join(lines[1:]))
    after = encoded(settings)
    assert len(after.encoded) == len(before.encoded) - 1
    assert after.digests != before.digests


@pytest.mark.usefixtures("every_file_is_large")
def test_a_file_that_changes_while_it_is_read_is_refused(
    tmp_path: Path, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings, file = config(tmp_path, CHATS[:5]), tmp_path / "rows.jsonl"

    def changing(source: Any) -> Any:
        yield from source_rows(source)
        file.write_text(file.read_text() + json.dumps(CHATS[9]) + "\n")

    monkeypatch.setattr("gym_fed.data.source_store.source_rows", changing)
    with pytest.raises(GymError, match=r"rows\.jsonl changed while it was being read"):
        rows_of_run(settings, None, None)
    assert not any(found.is_file() for found in home.rglob("*"))


@pytest.mark.usefixtures("every_file_is_large")
def test_bad_rows_are_refused_with_their_place_and_leave_nothing(tmp_path: Path, home: Path) -> None:
    settings = config(tmp_path, [*CHATS[:3], {"messages": []}])
    with pytest.raises(GymError, match=r"rows\.jsonl:4"):
        rows_of_run(settings, None, None)
    assert not any(file.is_file() for file in home.rglob("*"))


def test_files_that_fit_in_memory_leave_no_copy(tmp_path: Path, home: Path) -> None:
    assert encoded(config(tmp_path, CHATS)).counts.learned == len(CHATS)
    assert not home.exists()


@pytest.mark.usefixtures("every_file_is_large")
def test_rows_by_index_are_those_of_the_file(tmp_path: Path) -> None:
    settings = config(tmp_path, CHATS)
    rows, _ = rows_of_run(settings, None, None)
    plain = load_rows(tmp_path / "rows.jsonl")
    assert list(rows) == plain
    assert rows[len(rows) - 1] == plain[-1]
    assert rows[3:5] == plain[3:5]
