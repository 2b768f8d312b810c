"""Reward models with a value head beside them, as LLaMA-Factory saves them: full, adapter, and what is refused."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import save_file

from gym_fed.base.models import load_model, load_tokenizer
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.evaluation.graders.base import Sample
from gym_fed.evaluation.graders.reward_model import RewardModelConfig, RewardModelGrader

SAMPLES = [
    Sample([{"role": "user", "content": "say ab"}], said)
    for said in ("AB", "a much longer answer than that", "")
]


def head(folder: Path, width: int = 16, name: str = "v_head.summary") -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    weight, bias = torch.randn(1, width, generator=generator), torch.randn(1, generator=generator)
    save_file({f"{name}.weight": weight, f"{name}.bias": bias}, folder / "value_head.safetensors")
    return weight, bias


@pytest.fixture(params=["full", "adapter"])
def folder(request: Any, tiny_base: Path, tmp_path: Path) -> Path:
    there = tmp_path / "reward"
    if request.param == "full":
        shutil.copytree(tiny_base, there)
        return there
    loaded = load_model(str(tiny_base))
    adapted = get_peft_model(
        loaded.model, LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False)
    )
    adapted.save_pretrained(str(there))
    loaded.tokenizer.save_pretrained(str(there))
    return there


def grader(folder: Path, **keys: Any) -> RewardModelGrader:
    return RewardModelGrader(
        RewardModelConfig(grader="reward_model", model=str(folder), device="cpu", **keys)
    )


def test_the_score_is_the_heads_value_at_the_last_token_in_any_batch(folder: Path) -> None:
    weight, bias = head(folder)
    chosen = grader(folder)
    chosen.setup()
    found = chosen.grade(SAMPLES)
    model, tokenizer = load_model(str(folder)).model, load_tokenizer(str(folder))
    body = model.get_base_model().model if hasattr(model, "get_base_model") else model.model
    for sample, score in zip(SAMPLES, found, strict=True):
        assert isinstance(sample.prompt, list)
        messages = [*sample.prompt, {"role": "assistant", "content": sample.completion}]
        text = tokenizer.apply_chat_template(messages, tokenize=False)
        ids = tokenizer(text, add_special_tokens=False, return_tensors="pt")["input_ids"]
        with torch.inference_mode():
            last = body(input_ids=ids).last_hidden_state[0, -1]
        assert score == pytest.approx(float(weight[0] @ last + bias[0]), abs=1e-5)
    assert len(set(found)) == 3


@pytest.mark.parametrize(
    ("keys", "problem"),
    [
        ({"width": 8}, r"its shapes are \[1, 8\] and \[1\], not \[1, 16\]"),
        ({"name": "score"}, "v_head.summary.weight"),
    ],
)
def test_a_head_of_another_model_is_refused(
    tiny_base: Path, tmp_path: Path, keys: dict[str, Any], problem: str
) -> None:
    shutil.copytree(tiny_base, tmp_path / "reward")
    head(tmp_path / "reward", **keys)
    with pytest.raises(GymError, match=problem) as caught:
        grader(tmp_path / "reward").setup()
    assert caught.value.code is ErrorCode.MODEL_INVALID


def test_a_pickled_head_is_never_read(tiny_base: Path, tmp_path: Path) -> None:
    shutil.copytree(tiny_base, tmp_path / "reward")
    (tmp_path / "reward/value_head.bin").write_bytes(b"anything")
    with pytest.raises(GymError, match="is pickled, and pickles are never read"):
        grader(tmp_path / "reward")
