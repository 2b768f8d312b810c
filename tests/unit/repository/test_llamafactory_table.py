"""The tool that runs LLaMA-Factory's example files, on a folder of files of our own."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from tools import llamafactory_table as tool

QWEN = {"model_name_or_path": "acme/Qwen3-Tiny", "template": "qwen3_nothink"}
TRAINS = {
    **QWEN,
    **{"stage": "sft", "do_train": True, "finetuning_type": "lora", "lora_rank": 3, "lora_target": "q_proj"},
    **{"dataset": "brooks", "cutoff_len": 72, "learning_rate": 0.0003, "output_dir": "kept/brooks"},
    **{"per_device_train_batch_size": 2, "gradient_accumulation_steps": 3, "logging_steps": 1},
}
FILES: dict[str, dict[str, Any]] = {
    "answer/plain.yaml": {**QWEN, "max_new_tokens": 2},
    "learn/adapter.yaml": TRAINS,
    "learn/eight_bits.yaml": {**TRAINS, "fp8": True},
    "learn/experts.yaml": {**TRAINS, "use_kt": True},
    "learn/pictures.yaml": {
        **{**TRAINS, "model_name_or_path": "acme/Qwen3-VL-Tiny", "stage": "dpo", "dataset": "likes"},
        "template": "qwen3_vl_nothink",
    },
    "learn/stages.yaml": {**TRAINS, "pipeline_model_parallel_size": 3},
    "learn/typing_error.yaml": {**TRAINS, "lora_rnak": 3},
    "join/few_bits.yaml": {**QWEN, "export_dir": "kept/few", "export_quantization_bit": 3},
    "next/ring.yaml": {
        **{"model": "acme/Qwen3-Tiny", "model_class": "llm", "train_dataset": "data/brooks.json"},
        **{"cp_size": 2, "output_dir": "kept/ring"},
    },
}
REASONS = {
    "answer/plain.yaml": "runs",
    "join/few_bits.yaml": "refused: export_quantization_bit: no counterpart: GPTQ export supports only 4 and 8 bits",
    "learn/adapter.yaml": "runs",
    "learn/eight_bits.yaml": "refused: fp8: no counterpart: float8 training needs torchao",
    "learn/experts.yaml": "refused: use_kt: no counterpart: KTransformers computes",
    "learn/pictures.yaml": "runs",
    "learn/stages.yaml": "refused: pipeline_model_parallel_size: no counterpart: Megatron's",
    "learn/typing_error.yaml": "refused: lora_rnak: no counterpart: unknown key (did you mean 'lora_rank'?)",
    "next/ring.yaml": "refused: cp_size: no counterpart: 2: to split rows, use distributed.str",
}


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A repository as LLaMA-Factory lays it out: data, examples, and a file that is no job."""
    for name in ("HF_HOME", "HF_HUB_OFFLINE"):  # the tool sets them
        monkeypatch.setenv(name, "1")
    data, examples = tmp_path / "repo/data", tmp_path / "repo/examples"
    data.mkdir(parents=True)
    rows = [{"instruction": f"name brook {i}", "input": "", "output": f"brook {i}"} for i in range(6)]
    (data / "brooks.json").write_text(json.dumps(rows))
    pairs = [{**row, "chosen": "a brook", "rejected": "a hill"} for row in rows]
    (data / "likes.json").write_text(json.dumps(pairs))
    columns = {"prompt": "instruction", "chosen": "chosen", "rejected": "rejected"}
    info = {
        "brooks": {"file_name": "brooks.json"},
        "likes": {"file_name": "likes.json", "ranking": True, "columns": columns},
    }
    (data / "dataset_info.json").write_text(json.dumps(info))
    for name, values in {**FILES, "accelerate/two.yaml": {"num_processes": 2}}.items():
        file = examples / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(yaml.safe_dump(values))
    (tmp_path / "page.md").write_text(f"before\n{tool.BEGIN}old\n{tool.END}after\n")
    return tmp_path / "repo"


def test_each_file_runs_or_is_refused_as_expected_and_the_page_says_so(
    checkout: Path, tmp_path: Path
) -> None:
    page, kept = tmp_path / "page.md", tmp_path / "kept.json"
    assert tool.main([str(checkout), "--page", str(page), "--json", str(kept)]) == 0
    found = {outcome["file"]: outcome["text"] for outcome in json.loads(kept.read_text())}
    assert found.keys() == REASONS.keys()
    assert {name: found[name][: len(words)] for name, words in REASONS.items()} == REASONS
    text = page.read_text()
    assert text.startswith("before\n")
    assert text.endswith("after\n")
    assert "Of 9 files, 3 run and 6 are refused." in text
    assert "\n3 run as they are; the others:\n" in text
    assert re.search(r"\| refused: fp8: .* \| `learn/eight_bits.yaml` \|\n", text)
    assert "`learn/adapter.yaml`" not in text


def test_a_file_of_earlier_code_is_counted_and_a_defect_leaves_the_page(
    checkout: Path, tmp_path: Path
) -> None:
    page, kept = tmp_path / "page.md", tmp_path / "kept.json"
    given = [str(checkout), "--page", str(page), "--only", "none", "--former", str(kept)]
    rows = [tool.Outcome(name, True, "runs", code=tool.code_now()) for name in REASONS]
    first = vars(rows[0])
    kept.write_text(json.dumps([*map(vars, rows[1:])]))
    assert tool.main(given) == 0
    assert "old" in page.read_text(), "a file has no outcome yet"
    kept.write_text(json.dumps([{**first, "defect": True}, *map(vars, rows[1:])]))
    assert tool.main(given) == 1
    assert "old" in page.read_text()
    kept.write_text(json.dumps([{**first, "code": "earlier"}, *map(vars, rows[1:])]))
    assert tool.main(given) == 0
    assert "1 were not run again after the last change to our code.\n" in page.read_text()
    assert tool.main([*given, "--check"]) == 0
