"""Tool calls in LLaMA-Factory's layout under Qwen3's own template; rows with sound or films are named."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from gym_fed.base.models import load_tokenizer
from gym_fed.config.train.data_source import DataConfig
from gym_fed.data.encoding import IGNORED, encode_rows
from gym_fed.data.sources import source_rows
from tests.support.siblings import make_sibling

TOOLS = [
    {
        "name": "find_train",
        "description": "Finds a train.",
        "parameters": {"type": "object", "properties": {"to": {"type": "string"}}, "required": ["to"]},
    }
]
ROW = {
    "conversations": [
        {"from": "human", "value": "When is there a train to Bern?"},
        {"from": "function_call", "value": json.dumps({"name": "find_train", "arguments": {"to": "Bern"}})},
        {"from": "observation", "value": json.dumps({"departure": "12:04"})},
        {"from": "gpt", "value": "At four past twelve."},
    ],
    "tools": json.dumps(TOOLS),
}


def source(folder: Path, rows: list[dict[str, Any]], **columns: str) -> DataConfig:
    (folder / "rows.json").write_text(json.dumps(rows))
    described = {"file_name": "rows.json", "formatting": "sharegpt", "columns": columns}
    (folder / "dataset_info.json").write_text(json.dumps({"demo": described}))
    return DataConfig(dataset="demo", dataset_info=folder)


def test_the_call_and_the_answer_are_learned_as_qwen3_writes_them(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(str(make_sibling("qwen3", tmp_path / "model")))
    rows = [row for _, row in source_rows(source(tmp_path, [ROW], messages="conversations", tools="tools"))]
    (encoded,) = encode_rows(tokenizer, rows, max_length=4096)
    text = tokenizer.decode(encoded["input_ids"])
    learned = tokenizer.decode([label for label in encoded["labels"] if label != IGNORED])
    assert (
        '<tool_call>\n{"name": "find_train", "arguments": {"to": "Bern"}}\n</tool_call><|im_end|>' in learned
    )
    assert "At four past twelve.<|im_end|>" in learned
    for unlearned in ("find_train.", "Finds a train.", "12:04", "When is there a train"):
        assert unlearned not in learned
    assert '<tools>\n{"type": "function", "function": {"name": "find_train"' in text
    assert '<tool_response>\n{"departure": "12:04"}\n</tool_response>' in text
