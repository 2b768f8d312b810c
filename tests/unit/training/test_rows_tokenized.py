"""``tokenized_path``: rows that are encoded once and trained on later, on the tokenizer and keys that made them."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from typer.testing import CliRunner

from gym_fed.base.models import load_tokenizer
from gym_fed.cli.main import app
from gym_fed.config.train.training import TrainingConfig
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.data import generate
from gym_fed.training.rows.preprocess import preprocess
from gym_fed.training.trainer import Trainer
from tests.support.preferences import capitals


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    file = tmp_path / "rows.jsonl"
    given = [{"messages": row["messages"]} for row in generate("copy", 12)]
    long = {"messages": [{"role": "user", "content": "x y " * 200}, {"role": "assistant", "content": "y"}]}
    file.write_text("".join(json.dumps(row) + "\n" for row in [*given, long]))
    return file


def config(tmp_path: Path, rows: Path | None, **changes: Any) -> TrainingConfig:
    values: dict[str, Any] = {
        "model": "gym-nano",
        "data": [] if rows is None else [{"path": str(rows)}],
        "output_dir": tmp_path / "run",
        "tokenized_path": str(tmp_path / "tokens"),
        "max_steps": 2,
        "per_device_train_batch_size": 2,
        "max_length": 64,
        "device": "cpu",
        "num_threads": 1,
        "save_final": False,
    }
    return TrainingConfig(**{**values, **changes})


def test_preprocessing_writes_rows_with_digest_and_counts_and_a_later_run_learns_the_same(
    tmp_path: Path, rows: Path
) -> None:
    file = tmp_path / "sft.yaml"
    file.write_text(
        f"model: gym-nano\ndata: [{{path: {rows}}}]\neval_split: 2\nmax_length: 64\n"
        f"tokenized_path: {tmp_path}/tokens\npreprocess_only: true\noutput_dir: {tmp_path}/run\n"
    )
    done = CliRunner().invoke(app, ["train", str(file), "--json"])
    assert done.exit_code == 0, done.output
    index = json.loads((tmp_path / "tokens/index.json").read_text())
    assert not (tmp_path / "run").exists()
    assert (index["counts"]["rows"], index["eval_counts"]["rows"]) == (11, 2)
    assert index["counts"]["dropped"] + index["eval_counts"]["dropped"] == 1
    assert json.loads(done.stdout)["files"] == index["files"]

    rows_gone = config(tmp_path, None, eval_split=2)
    read = Trainer(rows_gone).train()
    plain = Trainer(
        config(tmp_path, rows, eval_split=2, tokenized_path=None, output_dir=tmp_path / "plain")
    ).train()
    assert read.losses == plain.losses
    assert read.rows == plain.rows
    assert [e["eval_loss"] for e in read.history if "eval_loss" in e] == [
        e["eval_loss"] for e in plain.history if "eval_loss" in e
    ]


def test_a_run_writes_its_own_rows_where_there_are_none_and_the_next_one_reads_them(
    tmp_path: Path, rows: Path
) -> None:
    first = Trainer(config(tmp_path, rows)).train()
    again = Trainer(config(tmp_path, rows, output_dir=tmp_path / "again")).train()
    assert first.losses == again.losses
    assert preprocess(config(tmp_path, rows))[0].learned == 12


def test_rows_for_another_loss_are_kept_too(tmp_path: Path) -> None:
    file = tmp_path / "pairs.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in capitals(4, 0)))
    settings = {"algorithm": "dpo", "dpo": {"beta": 0.5}}
    preprocess(config(tmp_path, file, **settings))
    run = Trainer(config(tmp_path, None, **settings)).train()
    assert run.num_examples == 4


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"max_length": 128}, "were encoded with max_length 64, but it is now 128"),
        ({"algorithm": "pretrain"}, "were encoded with algorithm 'sft', but it is now 'pretrain'"),
        ({"chat_template": "vicuna"}, "were encoded with a different chat template"),
        ({"mask_history": True}, "were encoded with mask_history False"),
    ],
)
def test_rows_that_were_made_by_other_keys_are_refused(
    tmp_path: Path, rows: Path, changes: dict[str, Any], problem: str
) -> None:
    preprocess(config(tmp_path, rows))
    with pytest.raises(GymError, match=problem) as caught:
        Trainer(config(tmp_path, None, **changes)).train()
    assert caught.value.code is ErrorCode.CONFIG_INVALID
    assert not (tmp_path / "run").exists()


def test_rows_of_another_tokenizer_are_refused(tmp_path: Path, rows: Path, tiny_base: Path) -> None:
    preprocess(config(tmp_path, rows))
    shutil.copytree(tiny_base, tmp_path / "other")
    tokenizer = load_tokenizer(str(tiny_base))
    tokenizer.add_tokens(["xyz"])
    tokenizer.save_pretrained(tmp_path / "other")
    with pytest.raises(GymError, match="were encoded with a different tokenizer"):
        preprocess(config(tmp_path, rows, model=str(tmp_path / "other")))


def test_sources_that_have_changed_since_are_refused(tmp_path: Path, rows: Path) -> None:
    preprocess(config(tmp_path, rows))
    rows.write_text(rows.read_text().replace('"y"', '"z"'))
    with pytest.raises(GymError, match="rows of data and eval_data differ from those in") as caught:
        Trainer(config(tmp_path, rows)).train()
    assert caught.value.code is ErrorCode.DATA_INVALID


def test_changed_bytes_and_ids_that_no_token_has_are_refused(tmp_path: Path, rows: Path) -> None:
    preprocess(config(tmp_path, rows))
    rewrite(tmp_path, lambda row: {**row, "input_ids": [999999, *row["input_ids"][1:]]}, typed)
    with pytest.raises(GymError, match="input_ids has ids outside the model's vocabulary"):
        Trainer(config(tmp_path, None)).train()
    file = tmp_path / "tokens/train.arrow"
    file.write_bytes(file.read_bytes().replace(b"\x3f\x42\x0f", b"\x3e\x42\x0f"))  # of 999999
    with pytest.raises(GymError, match=r"train\.arrow cannot be used: its bytes have changed"):
        Trainer(config(tmp_path, None)).train()


def test_what_cannot_be_kept_is_refused_before_anything_is_written(tmp_path: Path, rows: Path) -> None:
    with pytest.raises(GymError, match="tokenized_path: the rows of grpo need a second model"):
        preprocess(config(tmp_path, rows, algorithm="grpo", grpo={"num_generations": 2}))
    (tmp_path / "tokens").mkdir()
    (tmp_path / "tokens/mine.txt").write_text("kept")
    with pytest.raises(GymError, match=r"is not empty \(mine\.txt\)"):
        preprocess(config(tmp_path, rows))
    with pytest.raises(ValueError, match="preprocess_only needs tokenized_path"):
        config(tmp_path, rows, tokenized_path=None, preprocess_only=True)
    with pytest.raises(GymError, match="preprocess_only: nothing to train"):
        Trainer(config(tmp_path, rows, preprocess_only=True)).train()


def rewrite(tmp_path: Path, change: Any, write: Any = pa.RecordBatch.from_pylist) -> None:
    """Change the first encoded row, and the digest in the index with it."""
    file = tmp_path / "tokens/train.arrow"
    with pa.ipc.open_stream(file.read_bytes()) as reader:
        first, *others = reader.read_all().to_pylist()
    batch = write([change(first), *others])
    with pa.ipc.new_stream(str(file), batch.schema) as writer:
        writer.write_batch(batch)
    index = json.loads((tmp_path / "tokens/index.json").read_text())
    index["files"]["train.arrow"] = hashlib.sha256(file.read_bytes()).hexdigest()
    (tmp_path / "tokens/index.json").write_text(json.dumps(index))


def typed(rows: list[dict[str, Any]]) -> pa.RecordBatch:
    ids = pa.list_(pa.int32())
    return pa.RecordBatch.from_pylist(
        rows, pa.schema([("input_ids", ids), ("labels", ids), ("length", pa.int64())])
    )


@pytest.mark.parametrize(
    "change",
    [
        lambda index: {"format": index["format"]},
        lambda index: {**index, "made_by": []},
        lambda index: {**index, "files": None},
    ],
)
def test_an_index_of_a_strange_form_is_refused(tmp_path: Path, rows: Path, change: Any) -> None:
    preprocess(config(tmp_path, rows))
    index = json.loads((tmp_path / "tokens/index.json").read_text())
    (tmp_path / "tokens/index.json").write_text(json.dumps(change(index)))
    with pytest.raises(GymError) as raised:
        Trainer(config(tmp_path, None)).train()
    assert raised.value.code is ErrorCode.STATE_CORRUPT


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda row: {**row, "labels": row["labels"][1:]}, "different numbers of labels"),
        (lambda row: {**row, "input_ids": [-7, *row["input_ids"][1:]]}, "input_ids contains -7"),
        (lambda row: {**row, "input_ids": None}, "input_ids has rows without a value"),
    ],
)
def test_encoded_rows_of_a_strange_form_are_refused(
    tmp_path: Path, rows: Path, change: Any, problem: str
) -> None:
    preprocess(config(tmp_path, rows))
    rewrite(tmp_path, change, typed)
    with pytest.raises(GymError, match=problem) as raised:
        Trainer(config(tmp_path, None)).train()
    assert raised.value.code is ErrorCode.STATE_CORRUPT


def test_columns_that_no_algorithm_writes_and_files_that_are_no_arrow_are_refused(
    tmp_path: Path, rows: Path
) -> None:
    preprocess(config(tmp_path, rows))
    rewrite(tmp_path, lambda row: row)  # int64, as nothing here writes
    with pytest.raises(GymError, match="it has unknown columns"):
        Trainer(config(tmp_path, None)).train()
    file = tmp_path / "tokens/train.arrow"
    file.write_bytes(b"[1, 2]")
    index = json.loads((tmp_path / "tokens/index.json").read_text())
    index["files"]["train.arrow"] = hashlib.sha256(file.read_bytes()).hexdigest()
    (tmp_path / "tokens/index.json").write_text(json.dumps(index))
    with pytest.raises(GymError, match=r"train\.arrow cannot be used") as raised:
        Trainer(config(tmp_path, None)).train()
    assert raised.value.code is ErrorCode.STATE_CORRUPT
