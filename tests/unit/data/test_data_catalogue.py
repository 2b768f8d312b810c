"""The catalogue: every entry's rows, with the columns that the set really has, become rows to train on."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError
from typer.testing import CliRunner

from gym_fed.config.train.catalogue import CatalogueEntry, catalogue, catalogue_entry
from gym_fed.config.train.data_source import DataConfig
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.core.registries import FORMATS
from gym_fed.data.registry import checked_licence
from gym_fed.data.rows import kind_of
from gym_fed.data.sources import rows_of_entry, source_rows

ASK, SAY = {"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "4"}
NO = {"role": "assistant", "content": "5"}
HUMAN, GPT, BAD = (
    {"from": "human", "value": "2 + 2?"},
    {"from": "gpt", "value": "4"},
    {"from": "gpt", "value": "5"},
)
TALK = {"messages": [ASK, SAY]}
PAIR = {"prompt": [ASK], "chosen": [SAY], "rejected": [NO]}
ROWS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "alpaca": ({"instruction": "2 + 2?", "input": "", "output": "4", "text": "Below is"}, TALK),
    "gsm8k": ({"question": "2 + 2?", "answer": "4"}, TALK),
    "math": ({"problem": "2 + 2?", "level": "Level 1", "type": "Algebra", "solution": "4"}, TALK),
    "magicoder": ({"lang": "python", "index": 1, "seed": "", "problem": "2 + 2?", "solution": "4"}, TALK),
    "magicoder_evol": ({"instruction": "2 + 2?", "response": "4"}, TALK),
    "openorca": ({"id": "a", "system_prompt": "", "question": "2 + 2?", "response": "4"}, TALK),
    "api_bank": (
        {"file": "f", "id": 0, "instruction": "2 + 2?", "input": "", "expected_output": "4"},
        TALK,
    ),
    "ultrachat": ({"prompt": "2 + 2?", "prompt_id": "a", "messages": [ASK, SAY]}, TALK),
    "sharegpt": ({"id": "a", "conversations": [HUMAN, GPT]}, TALK),
    "glaive_toolcall_en": ({"conversations": [HUMAN, GPT], "tools": "[]"}, TALK),
    "ultrafeedback": ({"instruction": "2 + 2?", "chosen": "4", "rejected": "5"}, PAIR),
    "ultrafeedback_binarized": (
        {
            "prompt": "2 + 2?",
            "prompt_id": "a",
            "chosen": [ASK, SAY],
            "rejected": [ASK, NO],
            "messages": [ASK, SAY],
            "score_chosen": 9.0,
            "score_rejected": 2.0,
        },
        PAIR,
    ),
    "dpo_mix_en": ({"conversations": [HUMAN], "chosen": GPT, "rejected": BAD}, PAIR),
    "orca_pairs": ({"system": "", "question": "2 + 2?", "chosen": "4", "rejected": "5"}, PAIR),
    "kto_mix_en": (
        {"prompt": "2 + 2?", "completion": [ASK, SAY], "label": True, "rating": 5.0, "dataset": "x"},
        {"prompt": [ASK], "completion": [SAY], "label": True},
    ),
    "ultrafeedback_kto": (
        {"prompt": "2 + 2?", "completion": "4", "label": False},
        {"prompt": "2 + 2?", "completion": "4", "label": False},
    ),
    "refinedweb": ({"url": "u", "content": "words"}, {"text": "words"}),
    "fineweb": ({"text": "words", "url": "u", "token_count": 1}, {"text": "words"}),
}


def read(name: str, *raw: dict[str, Any]) -> list[dict[str, Any]]:
    return [
        row for _, row in rows_of_entry(catalogue_entry(name), ((f"row {i}", r) for i, r in enumerate(raw)))
    ]


@pytest.mark.parametrize("name", ROWS)
def test_rows_with_the_columns_of_the_set_become_rows_to_train_on(name: str) -> None:
    raw, wanted = ROWS[name]
    found = read(name, raw)
    if wanted is PAIR and isinstance(found[0]["chosen"], str):
        wanted = {"prompt": "2 + 2?", "chosen": "4", "rejected": "5"}
    assert found == [wanted]


def test_results_of_toolbench_calls_are_turns_of_the_user() -> None:
    turns = [
        {"from": "system", "value": "You are AutoGPT"},
        {"from": "user", "value": "2 + 2?"},
        {"from": "assistant", "value": "Action: add"},
        {"from": "function", "value": "4"},
        {"from": "assistant", "value": "4"},
    ]
    (row,) = read("toolbench", {"id": "a", "conversations": turns})
    assert [turn["role"] for turn in row["messages"]] == ["system", "user", "assistant", "user", "assistant"]


def test_a_column_that_the_set_no_longer_has_is_named() -> None:
    with pytest.raises(GymError, match="row 0: has no column 'answer'"):
        read("gsm8k", {"question": "2 + 2?"})


def test_every_entry_is_of_a_format_we_have_with_a_known_licence_or_none() -> None:
    names = [name for name, entry in catalogue().items() for name in (name, *entry.also)]
    assert len(names) == len(set(names)) > 80
    for name, entry in catalogue().items():
        assert entry.format in FORMATS.own(), name
        if entry.licence is not None:
            assert checked_licence(entry.licence) == entry.licence, name
        assert catalogue_entry(name) is entry
    kinds = {"preference": "preference", "kto": "unpaired"}
    for name, (raw, _) in ROWS.items():
        assert kind_of(read(name, raw)[0]) == kinds.get(catalogue_entry(name).format, "supervised")


def snapshot(cache: Path, hub: str, files: dict[str, str]) -> None:
    """A data set's snapshot, as the hub's cache keeps it."""
    repository = cache / f"datasets--{hub.replace('/', '--')}"
    folder = repository / "snapshots" / ("0" * 40)
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text("0" * 40)
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)


def card(*subsets: str) -> str:
    listed = [
        {"config_name": s, "data_files": [{"split": "train", "path": f"{s}/train.jsonl"}]} for s in subsets
    ]
    return f"---\nconfigs: {json.dumps(listed)}\n---\n"


def test_named_sets_are_read_from_the_cache_subset_by_subset(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    gsm8k = json.dumps({"question": "2 + 2?", "answer": "4"}) + "\n"
    other = json.dumps({"question": "other", "answer": "other"}) + "\n"
    files = {
        "README.md": card("main", "socratic"),
        "main/train.jsonl": gsm8k * 3,
        "socratic/train.jsonl": other,
    }
    snapshot(tmp_path, "openai/gsm8k", files)
    rows = list(source_rows(DataConfig(name="gsm8k", num_examples=2)))
    assert rows == [(f"openai/gsm8k (main, train): row {number}", TALK) for number in (1, 2)]
    subjects = catalogue_entry("math").subsets
    lines = {
        f"{s}/train.jsonl": json.dumps({"problem": s, "level": "1", "type": s, "solution": "4"})
        for s in subjects
    }
    snapshot(tmp_path, "EleutherAI/hendrycks_math", {"README.md": card(*subjects), **lines})
    found = [row["messages"][0]["content"] for _, row in source_rows(DataConfig(name="math"))]
    assert found == subjects
    bank = {"file": "f", "id": 0, "instruction": "2 + 2?", "input": "", "expected_output": "4"}
    snapshot(
        tmp_path,
        "liminghao1630/API-Bank",
        {
            "test-data/level-1-api.json": json.dumps([bank]),
            "test-data/level-2-api.json": json.dumps([bank]),
            "training-data/other.json": json.dumps([{"other": 1}]),
        },
    )
    assert [row for _, row in source_rows(DataConfig(name="apibank"))] == [TALK, TALK]


def test_a_trainer_takes_a_name_of_the_catalogue_as_its_dataset(
    tmp_path: Path, tiny_base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from huggingface_hub import constants

    from gym_fed import Trainer, TrainingConfig

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    row = {"instruction": "2 + 2?", "input": "", "output": "4"}
    snapshot(tmp_path, "llamafactory/alpaca_gpt4_en", {"train.json": json.dumps([row])})
    config = TrainingConfig(model=str(tiny_base), max_steps=1, output_dir=tmp_path / "run")
    assert Trainer(config).train(dataset="alpaca_gpt4_en").num_examples == 1


@pytest.mark.parametrize(
    ("name", "problem", "hint"),
    [
        (
            "identity",
            "is in LLaMA-Factory's repository",
            "dataset: identity, dataset_info: LLaMA-Factory/data",
        ),
        ("llava", "images that are not part of it: COCO", "put them next to the dataset's file"),
        ("agent_instruct", "has no default split", "set split"),
    ],
)
def test_a_set_that_cannot_be_fetched_alone_says_what_to_write(name: str, problem: str, hint: str) -> None:
    with pytest.raises(GymError, match=problem) as caught:
        list(source_rows(DataConfig(name=name)))
    assert caught.value.code is ErrorCode.USAGE
    assert hint in caught.value.hint


def test_an_unknown_name_is_refused_by_the_config_with_near_ones() -> None:
    with pytest.raises(ValidationError, match=r"no dataset 'gsm8'; use another name, such as gsm8k"):
        DataConfig(name="gsm8")
    with pytest.raises(ValidationError, match="give one of path, tasks, name, hub and dataset"):
        DataConfig(name="gsm8k", path="a.jsonl")


@pytest.mark.parametrize(
    "change", [{"hub": None}, {"llamafactory": "a.json"}, {"format": "kto"}, {"hub": "no-owner"}]
)
def test_an_entry_that_says_too_little_or_too_much_is_refused(change: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        CatalogueEntry.model_validate({"hub": "a/b", "format": "alpaca", "about": "x"} | change)


def test_the_command_lists_sets_and_shows_one_with_what_is_not_stated() -> None:
    from gym_fed.cli.main import app

    listed = CliRunner().invoke(app, ["data", "catalogue"]).output
    assert all(name in listed for name in catalogue())
    assert "EleutherAI/hendrycks_math" in listed  # a pipe gets all
    fitted = CliRunner().invoke(app, ["data", "catalogue"], env={"FORCE_COLOR": "1", "NO_COLOR": "1"})
    lines = re.sub(r"\x1b\[[0-9;]*m", "", fitted.stdout).splitlines()
    assert max(map(len, lines)) <= 80  # of a terminal that does not say how wide it is
    assert {line.split(" ", 1)[0] for line in lines[1:]} - {""} == set(catalogue())
    shown = CliRunner().invoke(app, ["data", "catalogue", "alpaca_en"]).output
    assert "licence  not stated" in shown
    facts = json.loads(CliRunner().invoke(app, ["data", "catalogue", "gsm8k", "--json"]).output)
    assert (facts["licence"], facts["rows"], facts["columns"]) == (
        "MIT",
        7473,
        {"instruction": "question", "output": "answer"},
    )
