"""The loss of an architecture's own head: fused where a contract test compares it, else from the model's logits."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from trl import SFTTrainer
from trl.trainer import sft_trainer
from trl.trainer.utils import add_fused_lm_head

from gym_fed.base.models import load_tokenizer
from gym_fed.config.train.training import TrainingConfig
from gym_fed.core.registries import ALGORITHMS
from gym_fed.data import generate
from gym_fed.training.model.output_head import FUSED, add_output_head, patched_output_heads
from gym_fed.training.trainer import Trainer
from tests.support.preferences import ROWS as PAIRS
from tests.support.quick import quick
from tests.support.siblings import make_sibling
from tests.support.tiny_models import farthest, gradients, rows_of_ids, tiny_config, tiny_model

USUAL = (
    *(
        "bamba",
        "bloom",
        "cohere",
        "cohere2",
        "falcon_h1",
        "gemma",
        "gemma2",
        "gemma3_text",
        "gpt2",
        "gpt_neox",
    ),
    *(
        "granite",
        "lfm2",
        "llama",
        "mamba2",
        "mistral",
        "mixtral",
        "olmo2",
        "opt",
        "phi3",
        "qwen2",
        "qwen2_moe",
    ),
    *("qwen3", "qwen3_moe", "starcoder2"),
)
VISION = {
    "gemma3": "gemma3_vision",
    "llava": "llava",
    "qwen2_5_vl": "qwen2_5_vl",
    "qwen2_vl": "qwen2_vl",
    "qwen3_vl": "qwen3_vl",
}
"""Their siblings."""
OWN = (
    "deepseek_v3",
    "glm4_moe",
    "granitemoe",
    "granitemoehybrid",
    "mpt",
    "nemotron_h",
    "phimoe",
    "recurrent_gemma",
)
"""Architectures for which TRL's head fails or computes another loss."""
FIELDS = ("log_probs", "entropy", "log_sum_sq_probs", "mean_logits", "is_top1")


def batch() -> dict[str, torch.Tensor]:
    """Two rows of ids, of which the second is padded and the first begins with a prompt."""
    ids = torch.cat(rows_of_ids(12, 12))
    labels, mask = ids.clone(), torch.ones_like(ids)
    labels[0, :5] = -100
    labels[1, 9:], mask[1, 9:] = -100, 0
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def adapted(model: Any) -> Any:
    """With a LoRA adapter on the linear layers that PEFT allows, whose second factors are not zero."""
    excluded = r".*(out_proj|conv1d|router|gate)"
    model = get_peft_model(model, LoraConfig(r=2, target_modules="all-linear", exclude_modules=excluded))
    torch.manual_seed(2)
    for name, weight in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(weight, std=0.05)
    return model.eval()


def base_of(model: Any) -> Any:
    return model.get_base_model() if hasattr(model, "peft_config") else model


def model_of(kind: str, folder: Path) -> Any:
    """A tiny model of a type; of one that reads images, a sibling of the published model."""
    if kind not in VISION:
        return tiny_model(kind)
    from transformers import AutoModelForImageTextToText

    make_sibling(VISION[kind], folder)
    return AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32).eval()


@pytest.mark.few(8, "one head for every class")
@pytest.mark.parametrize("lora", [False, True])
@pytest.mark.parametrize("kind", quick(sorted((*FUSED, *OWN)), *USUAL, *OWN, *VISION))
def test_the_heads_loss_and_gradient_are_those_of_the_models_own_forward(
    kind: str, lora: bool, tmp_path: Path
) -> None:
    model = model_of(kind, tmp_path)
    model = adapted(model) if lora else model
    own = model(**batch(), use_cache=False)
    own.loss.backward()
    expected = gradients(model)
    add_output_head(base_of(model), outputs=FIELDS)
    found = model(**batch(), fused_lm_head=True)
    found.loss.backward()
    assert float(found.loss.detach()) == pytest.approx(float(own.loss.detach()), rel=1e-5)
    assert farthest(gradients(model), expected) < 2e-4
    assert any(value.abs().max() > 0 for value in expected.values())
    log_probs = own.logits.detach()[:, :-1].float().log_softmax(-1)
    labels = batch()["labels"][:, 1:]
    mask = labels != -100
    picked = log_probs.gather(-1, labels.clamp(min=0)[..., None])[..., 0] * mask
    torch.testing.assert_close(found.log_probs.detach(), picked, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(
        found.entropy.detach(), -(log_probs.exp() * log_probs).sum(-1) * mask, atol=1e-4, rtol=1e-4
    )
    assert torch.equal(found.label_mask, mask)
    assert torch.equal(found.is_top1.bool(), (log_probs.argmax(-1) == labels) & mask)


@pytest.mark.parametrize("kind", OWN)
def test_an_architecture_for_which_the_fused_head_is_wrong_is_not_listed(kind: str) -> None:
    model = tiny_model(kind)
    assert kind not in FUSED
    with torch.no_grad():
        own = model(**batch(), use_cache=False).loss
        add_fused_lm_head(model)
        if not hasattr(model.config, "num_experts") and getattr(model.config, "output_router_logits", False):
            with pytest.raises(AttributeError, match="num_experts"):
                model(**batch(), fused_lm_head=True)
            return
        assert abs(float(model(**batch(), fused_lm_head=True).loss - own)) > 1e-2


def test_the_models_own_head_has_the_fields_of_the_fused_one(monkeypatch: pytest.MonkeyPatch) -> None:
    from gym_fed.training.model import output_head

    found = []
    for fused in (True, False):
        model = tiny_model("mixtral")
        monkeypatch.setattr(output_head, "FUSED", {"mixtral"} if fused else set())
        add_output_head(model, temperature=0.7, outputs=FIELDS)
        output = model(**batch(), fused_lm_head=True, output_router_logits=True, num_items_in_batch=7)
        output.loss.backward()
        found.append((output, gradients(model)))
        assert model(**batch(), use_cache=False).logits.shape == (2, 12, 96)
    (one, its), (other, theirs) = found
    for name in (*FIELDS, "loss", "aux_loss", "label_mask"):
        torch.testing.assert_close(
            getattr(one, name).float(), getattr(other, name).float(), atol=1e-5, rtol=1e-5
        )
    assert farthest(its, theirs) < 1e-4


def test_labels_that_are_all_ignored_give_a_loss_of_zero_with_a_gradient() -> None:
    model = tiny_model("mpt")
    add_output_head(model)
    given = {**batch(), "labels": torch.full((2, 12), -100)}
    loss = model(**given, fused_lm_head=True).loss
    loss.backward()
    assert loss.item() == 0.0


def test_trl_has_its_own_head_back_after_a_trainer_is_made() -> None:
    before = sft_trainer.add_fused_lm_head
    with patched_output_heads(type("Ours", (SFTTrainer,), {})):
        assert sft_trainer.add_fused_lm_head is add_output_head
    assert sft_trainer.add_fused_lm_head is before


CASES = {
    "sft": {},
    "pretrain": {"packing": False},
    "dpo": {},
    "kto": {},
    "gradient_difference": {},
    "npo": {},
}


@pytest.mark.parametrize("algorithm", CASES)
@pytest.mark.parametrize("kind", quick(["mpt", "granitemoe"], "granitemoe"))
def test_algorithms_train_architectures_without_a_fused_head(
    kind: str, algorithm: str, tmp_path: Path
) -> None:
    tokenizer = load_tokenizer("gym-nano")
    model = tiny_model(kind, vocab_size=len(tokenizer))
    config = TrainingConfig(
        algorithm=algorithm, output_dir=tmp_path / "run", max_steps=1, per_device_train_batch_size=2, max_length=64,
        device="cpu", num_threads=1, save_final=False, learning_rate=1e-3, **CASES[algorithm],
    )  # fmt: skip
    rows: list[dict[str, Any]] = PAIRS[:8] if algorithm in ("dpo", "kto") else generate("copy", 8)
    if algorithm in ("gradient_difference", "npo"):
        rows = [{**row, "forget": number % 2 == 0} for number, row in enumerate(rows)]
    result = Trainer(config, model=model, tokenizer=tokenizer).train(rows)
    assert result.steps == 1
    assert abs(result.losses[0]) > 1e-3


def test_the_first_loss_of_a_run_is_the_one_of_the_models_own_forward(tmp_path: Path) -> None:
    tokenizer = load_tokenizer("gym-nano")
    model = tiny_model("recurrent_gemma", vocab_size=len(tokenizer))
    rows = generate("copy", 2)
    config = TrainingConfig(
        output_dir=tmp_path / "run", max_steps=1, per_device_train_batch_size=1, gradient_accumulation_steps=2,
        max_length=64, device="cpu", num_threads=1, save_final=False,
    )  # fmt: skip
    encoded = ALGORITHMS.new("sft").encode(config, tokenizer, rows)
    with torch.no_grad():
        sums, count = 0.0, 0
        for row in encoded:
            labels = torch.tensor([row["labels"]])
            loss = model(input_ids=torch.tensor([row["input_ids"]]), labels=labels, use_cache=False).loss
            number = int((labels[:, 1:] != -100).sum())
            sums, count = sums + float(loss) * number, count + number
    result = Trainer(config, model=model, tokenizer=tokenizer).train(rows)
    assert result.losses[0] == pytest.approx(sums / count, rel=1e-4)


@pytest.mark.parametrize(("kind", "logits"), [("llama", "tiled"), ("mpt", "whole")])
def test_a_plan_reckons_with_whole_logits_where_there_is_no_fused_head(
    kind: str, logits: str, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(
        json.dumps({**tiny_config(kind).to_diff_dict(), "model_type": kind})
    )
    for algorithm in ("sft", "dpo", "grpo"):
        config = TrainingConfig(model=str(tmp_path), algorithm=algorithm)
        assert ALGORITHMS.type_of(algorithm).logits(config) == logits
