"""Runs whose rows or blocks are split over two processes end with the weights and the figures of one process."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen3Config

from gym_fed.base.models import load_model
from tests.support.process_pair import OPTIONS, gradient_norms, reported, train_jobs

pytestmark = pytest.mark.slow

TOLERANCE = 1e-6
DOUBLES = {"data": [{"tasks": ["double"], "num_examples": 32}]}
HELD_OUT = {"eval_steps": 2, "eval_data": [{"tasks": ["double"], "num_examples": 7, "seed": 5}]}
LORA = {"finetuning": "lora", "lora": {"r": 4}}
NAMES = ["sft-llama", "sft-qwen3", "sft-lora", "sft-packed", "dpo", "dpo-lora"]
STRATEGIES: dict[str, dict[str, Any]] = {
    "sequence_parallel": {"strategy": "sequence_parallel"},
    "pipeline_parallel": {"strategy": "pipeline_parallel"},
}


def jobs(folder: Path) -> dict[str, dict[str, Any]]:
    """Configs by name: three micro-batches of two rows a step, so that rows are padded to different lengths."""
    torch.manual_seed(0)
    nano = load_model("gym-nano")
    sizes = {
        "vocab_size": nano.model.config.vocab_size,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_attention_heads": 4,
        "max_position_embeddings": 256,
    }
    classes = {
        "llama": LlamaConfig(**sizes, num_hidden_layers=4, num_key_value_heads=2, tie_word_embeddings=False),
        "qwen3": Qwen3Config(
            **sizes, num_hidden_layers=3, num_key_value_heads=1, head_dim=8, tie_word_embeddings=True
        ),
    }
    for name, config in classes.items():
        AutoModelForCausalLM.from_config(config).save_pretrained(folder / name)
        nano.tokenizer.save_pretrained(folder / name)
    pairs = [
        {
            "prompt": f"What is {n} and {n * 7 % 11}?",
            "chosen": f"It is {n + n * 7 % 11}." + " Sure." * (n % 3),
            "rejected": f"No: {n}.",
        }
        for n in range(24)
    ]
    (folder / "pairs.jsonl").write_text("\n".join(map(json.dumps, pairs)))
    common = {**OPTIONS, "per_device_train_batch_size": 2, "gradient_accumulation_steps": 3}
    llama, qwen3 = ({**common, **DOUBLES, "model": str(folder / name)} for name in classes)
    dpo = {"algorithm": "dpo", "data": [{"path": str(folder / "pairs.jsonl")}]}
    return {
        "sft-llama": {**llama, "gradient_checkpointing": True},
        "sft-qwen3": {**qwen3, **HELD_OUT, "optimizer": "adamw", "optimizer_args": {}},
        "sft-lora": {**llama, **LORA, "max_grad_norm": 0.0},
        "sft-packed": {**llama, "packing": "bfd"},
        "dpo": {**qwen3, **dpo},
        "dpo-lora": {**llama, **dpo, **LORA},
    }


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("split")
    return train_jobs(folder / "alone", jobs(folder), 1)


@pytest.fixture(scope="module", params=STRATEGIES)
def together(request: pytest.FixtureRequest, alone: Path) -> Path:
    configs = json.loads((alone / "jobs.json").read_text())
    for name, config in configs.items():
        config["distributed"] = {"timeout_seconds": 120, **STRATEGIES[request.param]}
        if request.param == "pipeline_parallel" and name == "sft-packed":
            config["distributed"]["pipeline_schedule"] = "gpipe"
    return train_jobs(alone.parent / request.param, configs, 2)


@pytest.mark.parametrize("name", NAMES)
def test_two_processes_give_the_weights_and_figures_of_one(name: str, alone: Path, together: Path) -> None:
    one, two = alone / name, together / name
    for file in ("model.safetensors", "adapter_model.safetensors"):
        assert (one / file).exists() == (two / file).exists()
        if not (one / file).exists():
            continue
        expected, found = load_file(one / file), load_file(two / file)
        assert expected.keys() == found.keys()
        # Adam divides by the size of a gradient, and so enlarges the rounding of sums in another order.
        near = 1e-5 if name == "sft-qwen3" else TOLERANCE
        assert max((expected[key] - found[key]).abs().max().item() for key in expected) < near
    assert reported(two, "loss") == pytest.approx(reported(one, "loss"), rel=1e-5)
    assert gradient_norms(two) == pytest.approx(gradient_norms(one), rel=1e-4)
    assert reported(two, "num_tokens") == reported(one, "num_tokens")
    evaluations = [[e["eval_loss"] for e in reported(folder, "evaluation") if e] for folder in (one, two)]
    assert evaluations[1] == pytest.approx(evaluations[0], rel=1e-5)


def test_the_runs_move_the_weights_and_clip_their_gradients(alone: Path) -> None:
    before = load_file(alone.parent / "llama" / "model.safetensors")
    after = load_file(alone / "sft-llama" / "model.safetensors")
    assert max((before[key] - after[key]).abs().max().item() for key in before) > 100 * TOLERANCE
    assert min(gradient_norms(alone / "sft-llama")) > OPTIONS["max_grad_norm"]


@pytest.mark.parametrize("strategy", list(STRATEGIES))
@pytest.mark.parametrize("name", ["sft-qwen3", "sft-lora"])
def test_a_stopped_run_resumes_with_its_optimizer(
    name: str, strategy: str, alone: Path, tmp_path: Path
) -> None:
    config = json.loads((alone / "jobs.json").read_text())[name]
    settings = {"timeout_seconds": 120, **STRATEGIES[strategy]}
    config = {**config, "save_steps": 2, "distributed": settings}
    first = train_jobs(tmp_path / "whole", {name: config}, 2)
    begun = tmp_path / "begun" / name
    shutil.copytree(first / name / "checkpoints", begun / "checkpoints")
    resumed = {**config, "resume_from_checkpoint": str(begun / "checkpoints" / "checkpoint-2")}
    for file in ("run.json", "config.yaml"):
        shutil.copy(first / name / file, begun / file)
    second = train_jobs(tmp_path / "resumed", {name: resumed}, 2)
    file = "adapter_model.safetensors" if name == "sft-lora" else "model.safetensors"
    expected, found = load_file(first / name / file), load_file(second / name / file)
    assert all(torch.equal(expected[key], found[key]) for key in expected)
    assert reported(second / name, "step")[-1] == 3
