"""Nulls that Arrow fills in from other rows' keys are no part of a row; a null that a JSONL row holds is."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow
import pytest
from datasets import Dataset
from pyarrow import parquet

from gym_fed.base.models import load_model
from gym_fed.config.train.data_source import DataConfig
from gym_fed.config.train.training import TrainingConfig
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.data.encoding import encode_rows
from gym_fed.data.paging import PagedFile
from gym_fed.data.reading import load_rows
from gym_fed.data.rows import Row, memory_rows, without_filled_nulls
from gym_fed.data.sources import source_rows
from gym_fed.data.writing import write_rows
from gym_fed.personalization.rows import read_rows
from gym_fed.training.rows.run_rows import rows_of_run
from gym_fed.training.trainer import Trainer
from tests.support.conversations import byte_tokenizer

TEMPLATE = (
    "{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{% for call in m.tool_calls or [] %}{{ call.function.arguments | tojson }}{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def row(name: str, argument: str, value: Any) -> Row:
    call = {"type": "function", "function": {"name": name, "arguments": {argument: value}}}
    schema = {"type": "object", "properties": {argument: {"type": "string"}}}
    return {
        "messages": [
            {"role": "user", "content": f"Call {name}."},
            {"role": "assistant", "content": "", "tool_calls": [call]},
        ],
        "tools": [{"type": "function", "function": {"name": name, "parameters": schema}}],
    }


ROWS = [row("move", "x", 1), row("wait", "t", 2)]


def learned(rows: Any) -> list[Any]:
    return [dict(one) for one in rows]


def test_calls_and_schemas_of_a_parquet_file_hold_their_own_keys_alone(tmp_path: Path) -> None:
    file = tmp_path / "rows.parquet"
    parquet.write_table(pyarrow.Table.from_pylist(ROWS), file)
    assert "None" in str(parquet.read_table(file).to_pylist()), "Arrow fills keys in"
    assert learned(load_rows(file)) == ROWS
    assert [one.load() for one in PagedFile(file, "rows.parquet").rows()] == ROWS
    tokenizer = byte_tokenizer(TEMPLATE)
    for encoded in encode_rows(tokenizer, load_rows(file), max_length=1000, assistant_only=False):
        assert "null" not in tokenizer.decode(encoded["input_ids"])


def test_rows_of_a_hub_dataset_hold_their_own_keys_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    for name, suffix in (("calls", "parquet"), ("lines", "jsonl")):
        repository = tmp_path / f"datasets--someone--{name}"
        snapshot = repository / "snapshots" / ("0" * 40)
        snapshot.mkdir(parents=True)
        (repository / "refs").mkdir()
        (repository / "refs" / "main").write_text("0" * 40)
        if suffix == "parquet":
            parquet.write_table(pyarrow.Table.from_pylist(ROWS), snapshot / "train.parquet")
        else:
            (snapshot / "train.jsonl").write_text("".join(f"{json.dumps(one)}\n" for one in ROWS))
        assert learned(one for _, one in source_rows(DataConfig(hub=f"someone/{name}"))) == ROWS


def test_a_dataset_in_memory_is_trained_and_measured_without_filled_nulls() -> None:
    dataset = Dataset(pyarrow.Table.from_pylist(ROWS))
    assert "None" in str(list(dataset))
    assert rows_of_run(TrainingConfig(), dataset, dataset) == (ROWS, ROWS)
    assert learned(read_rows(dataset).train) == ROWS
    tokenizer = byte_tokenizer(TEMPLATE)
    assert list(encode_rows(tokenizer, dataset, max_length=999)) == list(
        encode_rows(tokenizer, ROWS, max_length=999)
    )


def test_values_that_datasets_keeps_as_json_are_as_they_were_written() -> None:
    explicit = [{"a": {"x": None}, "b": 1}, {"a": {"y": [None, {"z": None}]}, "b": 2}]
    from datasets import Features, Json, Value

    kept = Dataset.from_list(explicit, features=Features({"a": Json(), "b": Value("int64")}))
    assert list(memory_rows(kept)) == explicit
    assert without_filled_nulls({"a": [None, {"b": None, "c": 1}]}) == {"a": [None, {"c": 1}]}
    assert memory_rows(explicit) is explicit


def test_an_explicit_null_of_a_jsonl_row_is_kept_and_parquet_refuses_to_lose_it(tmp_path: Path) -> None:
    explicit = row("move", "x", None)
    file = tmp_path / "rows.jsonl"
    file.write_text(json.dumps(explicit) + "\n")
    assert learned(load_rows(file)) == [explicit]
    with pytest.raises(GymError, match="rows 1 to 1 have nulls") as caught:
        write_rows(tmp_path / "rows.parquet", load_rows(file))
    assert caught.value.code is ErrorCode.DATA_INVALID
    assert not (tmp_path / "rows.parquet").exists()
    assert write_rows(tmp_path / "good.parquet", ROWS) == 2
    assert learned(load_rows(tmp_path / "good.parquet")) == ROWS


@pytest.mark.parametrize("algorithm", ["grpo", "rloo"])
def test_prompts_that_are_answered_in_training_hold_their_own_keys_alone(
    tiny_base: Path, tmp_path: Path, algorithm: str
) -> None:
    loaded = load_model(str(tiny_base))
    loaded.tokenizer.chat_template = TEMPLATE.replace(
        "{{ call.function.arguments | tojson }}",
        "{% if 'null' in call.function.arguments | tojson %}{{ raise_exception('a null was filled in') }}{% endif %}",
    )
    prompts: list[Row] = [
        {
            "prompt": [
                *one["messages"],
                {"role": "tool", "content": "done"},
                {"role": "user", "content": "ok?"},
            ]
        }
        for one in [*ROWS, row("say", "x", "text where another row has a number")]
    ]
    config = TrainingConfig(
        algorithm=algorithm,
        output_dir=tmp_path / "run",
        max_steps=1,
        per_device_train_batch_size=6,
        save_final=False,
        graders=[{"grader": "length", "max": 4}],
        **{algorithm: {"max_completion_length": 2, "num_generations": 2}},
    )
    assert Trainer(config, model=loaded.model, tokenizer=loaded.tokenizer).train(prompts).steps == 1
