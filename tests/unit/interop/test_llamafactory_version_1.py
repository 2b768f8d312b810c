"""Files of LLaMA-Factory's version 1: sections of plug-ins and data in a YAML file of its own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from gym_fed.config.train.training import TrainingConfig
from gym_fed.config.training_file import as_yaml, load_training_config
from gym_fed.config.yaml.file import load_config
from gym_fed.core.errors import ErrorCode, GymError
from tests.unit.interop.test_llamafactory import at

QUESTION = {"role": "user", "content": [{"type": "text", "value": "Name a river."}], "loss_weight": 0.0}
ANSWER = {"role": "assistant", "content": [{"type": "text", "value": "The Elbe."}], "loss_weight": 1.0}
OTHER = {"role": "assistant", "content": [{"type": "text", "value": "A hill."}], "loss_weight": 1.0}
BASIC: dict[str, Any] = {
    "model": "gym-nano",
    "model_class": "llm",
    "kernel_config": {"name": "auto"},
    "quant_config": None,
    "dist_config": {"name": "fsdp2", "dcp_path": None},
    "train_dataset": "data/talk.yaml",
    "output_dir": "saves/one",
    "micro_batch_size": 3,
    "cutoff_len": 512,
    "learning_rate": 3.0e-5,
    "max_steps": 7,
    "sample_backend": "hf",
    "max_new_tokens": 64,
}
DEFAULTS = {
    "algorithm": "sft",
    "finetuning": "full",
    "mixed_precision": "bf16",
    "optimizer": "adamw",
    "weight_decay": 0.01,
    "lr_scheduler_type": "constant",
    "num_train_epochs": 3.0,
    "per_device_train_batch_size": 3,
    "gradient_accumulation_steps": 1,
    "gradient_checkpointing": True,
    "logging_steps": 1,
    "save_steps": 0,
    "seed": 42,
    "max_length": 512,
    "max_steps": 7,
    "attention": "auto",
    "data.0.path": "data/talk.jsonl",
}
LORA = {"name": "lora", "r": 4, "lora_alpha": 12, "lora_dropout": 0.1, "target_modules": "all"}
MUON = {"name": "muon", "wd": 0.2, "momentum": 0.9, "ns_steps": 4, "adamw_betas": [0.8, 0.9]}
SHAPES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "full, in one process": ({}, {"distributed": None, **DEFAULTS}),
    "lora": (
        {"peft_config": LORA},
        {
            "finetuning": "lora",
            "lora.r": 4,
            "lora.lora_alpha": 12,
            "lora.lora_dropout": 0.1,
            "lora.target_modules": "all-linear",
        },
    ),
    "lora by default": ({"peft_config": {"name": "lora"}}, {"lora.r": 8, "lora.lora_dropout": 0.05}),
    "freeze": (
        {"peft_config": {"name": "freeze", "freeze_trainable_layers": 1, "freeze_trainable_modules": "mlp"}},
        {"finetuning": "freeze", "freeze.num_trainable_layers": 1, "freeze.trainable_modules": ["mlp"]},
    ),
    "quantised": (
        {"peft_config": LORA, "quant_config": {"name": "bnb", "quantization_bit": 4}},
        {"quantization.bits": 4, "quantization.compute_dtype": "bfloat16"},
    ),
    "muon": (
        {"optim_config": MUON},
        {
            "optimizer": "muon",
            "weight_decay": 0.2,
            "optimizer_args.momentum": 0.9,
            "optimizer_args.ns_steps": 4,
            "optimizer_args.nesterov": True,
            "adam_beta1": 0.8,
            "adam_beta2": 0.9,
        },
    ),
    "accumulated": ({"global_batch_size": 12}, {"gradient_accumulation_steps": 4}),
    "packed": ({"batching_strategy": "dynamic_batching"}, {"packing": "bfd"}),
    "not padded": ({"batching_strategy": "padding_free"}, {"packing": None}),
    "liger": ({"kernel_config": {"name": "liger_kernel"}}, {"liger": True}),
    "in float32": (
        {"bf16": False, "enable_activation_checkpointing": False, "flash_attn": "eager"},
        {"mixed_precision": "no", "gradient_checkpointing": False, "attention": "eager"},
    ),
    "pairs": (
        {"train_dataset": "data/pairs.yaml", "peft_config": LORA, "pref_beta": 0.3},
        {
            "algorithm": "dpo",
            "dpo.beta": 0.3,
            "finetuning": "lora",
            "lora.lora_dropout": 0.0,
            "data.0.path": "data/pairs.jsonl",
        },
    ),
    "a reward model": (
        {"train_dataset": "data/pairs.yaml", "model_class": "cls"},
        {"algorithm": "reward_model"},
    ),
    "rows without a list": ({"train_dataset": "data/talk.jsonl"}, {"data.0.path": "data/talk.jsonl"}),
    "experts over processes": (
        {"dist_config": {"name": "fsdpturbo", "ep_size": 16}, "init_config": {"name": "init_on_meta"}},
        {"distributed": None},
    ),
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    data = tmp_path / "data"
    data.mkdir()
    (data / "talk.jsonl").write_text(json.dumps({"messages": [QUESTION, ANSWER]}) + "\n")
    pair = {"chosen_messages": [QUESTION, ANSWER], "rejected_messages": [QUESTION, OTHER]}
    (data / "pairs.jsonl").write_text(json.dumps(pair) + "\n")
    (data / "talk.yaml").write_text("talk:\n  path: data/talk.jsonl\n  source: local\n")
    (data / "pairs.yaml").write_text("pairs:\n  path: data/pairs.jsonl\n  source: local\n")
    return tmp_path


def written(folder: Path, changes: dict[str, Any]) -> Path:
    file = folder / "theirs.yaml"
    file.write_text(yaml.safe_dump({**BASIC, **changes}, sort_keys=False))
    return file


@pytest.mark.parametrize("name", SHAPES)
def test_a_file_of_version_1_is_translated_key_by_key_and_reads_the_same_when_imported(
    folder: Path, name: str
) -> None:
    changes, expected = SHAPES[name]
    file = written(folder, changes)
    config, notes = load_training_config(file, processes=1)
    for path, value in expected.items():
        assert at(config, path) == value, path
    assert not any("no counterpart" in note for note in notes)
    if "distributed" not in expected:
        (folder / "ours.yaml").write_text(as_yaml(file)[0])
        ours = load_config(folder / "ours.yaml", TrainingConfig)
        assert ours.model_copy(update={"distributed": None}) == config


@pytest.mark.parametrize(
    ("section", "strategy", "stage"),
    [
        ({"name": "fsdp2"}, "fsdp2", None),
        ({"name": "deepspeed", "config_file": "ds_z3_config.json"}, "deepspeed", 3),
    ],
)
def test_several_processes_share_the_model_and_one_says_that_it_does_not(
    folder: Path, section: dict[str, Any], strategy: str, stage: int | None
) -> None:
    file = written(folder, {"dist_config": section, "global_batch_size": 6})
    two, _ = load_training_config(file, processes=2)
    assert two.distributed is not None
    assert (two.distributed.strategy, two.distributed.zero_stage) == (strategy, stage)
    assert two.gradient_accumulation_steps == 1
    one, notes = load_training_config(file, processes=1)
    assert one.distributed is None
    assert one.gradient_accumulation_steps == 2
    assert sum("dist_config." in note and "single process" in note for note in notes) == 1


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"cp_size": 2}, "to split rows, use distributed.strategy sequence_parallel"),
        ({"peft_config": {"name": "oft"}}, "'oft' is not one of lora, freeze"),
        ({"peft_config": {"name": "lora", "rank": 4}}, "peft_config.rank: no counterpart: unknown key"),
        ({"optim_config": {"name": "lion"}}, "'lion' is unknown; version 1 has only muon"),
        ({"lr_scheduler_config": {"name": "mine"}}, "is a plug-in"),
        ({"quant_config": {"name": "hqq"}}, "'hqq' is not one of auto, bnb"),
        ({"global_batch_size": 7}, "7 is not a multiple of the 3 rows"),
        ({"batching_strategy": "sorted"}, "'sorted' is unknown"),
        ({"cutof_len": 7}, "did you mean 'cutoff_len'"),
    ],
)
def test_what_has_no_counterpart_stops_the_run_with_its_line(
    folder: Path, changes: dict[str, Any], words: str
) -> None:
    file = written(folder, changes)
    with pytest.raises(GymError, match=words) as caught:
        load_training_config(file, processes=1)
    place = int(caught.value.message.removeprefix(f"{file}:").split(":")[0])
    key = caught.value.message.split(": ")[1].split(".")[-1]
    assert file.read_text().splitlines()[place - 1].strip().startswith(key)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("talk:\n  source: local\n", r"talk.yaml:1:1: talk: path is missing"),
        ("talk:\n  path: x\n  source: s3\n", "source 's3' is not one of"),
        ("talk:\n  path: x\n  converter: mine\n", "converter 'mine' is not one of"),
        ("talk:\n  path: x\n  sise: 3\n", "unknown key 'sise'"),
    ],
)
def test_a_source_that_cannot_be_read_is_named_with_its_line(folder: Path, text: str, words: str) -> None:
    (folder / "data/talk.yaml").write_text(text)
    with pytest.raises(GymError, match=words) as caught:
        load_training_config(written(folder, {}), processes=1)
    assert caught.value.code is ErrorCode.CONFIG_INVALID


def test_size_weight_and_converter_of_a_source_are_read(folder: Path) -> None:
    entries = {
        "a": {"path": "data/a.json", "source": "local", "converter": "alpaca", "size": 5, "weight": 2.0},
        "b": {"path": "owner/rows", "split": "test"},
    }
    (folder / "data/talk.yaml").write_text(yaml.safe_dump(entries))
    config, notes = load_training_config(written(folder, {}), processes=1)
    first, second = config.data
    assert (first.path, first.format, first.num_examples, first.weight) == ("data/a.json", "alpaca", 5, 2.0)
    assert (second.hub, second.split) == ("owner/rows", "test")
    assert any("size 5: the first rows" in note for note in notes)


@pytest.mark.parametrize(
    ("values", "command"),
    [
        ({"model": "gym-nano", "peft_config": {"name": "lora", "export_dir": "merged"}}, "gym export"),
        ({"model": "gym-nano", "model_class": "llm"}, "gym chat"),
        ({"model_name_or_path": "gym-nano", "template": "qwen3", "export_dir": "merged"}, "gym export"),
        ({"model_name_or_path": "gym-nano", "template": "qwen3", "infer_backend": "huggingface"}, "gym api"),
    ],
)
def test_a_file_for_another_command_is_refused_with_that_command(
    folder: Path, values: dict[str, Any], command: str
) -> None:
    file = folder / "theirs.yaml"
    file.write_text(yaml.safe_dump(values))
    with pytest.raises(GymError, match="but gym train trains") as caught:
        load_training_config(file)
    assert command in caught.value.hint
