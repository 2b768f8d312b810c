"""Models are loaded with torch's attention where their class has it, and else with the one written out."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from gym_fed.base.models import load_model, load_tokenizer
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.data import generate
from gym_fed.training.trainer import Trainer
from tests.support.adapters import settings
from tests.support.tiny_models import tiny_model


def saved(kind: str, folder: Path) -> Path:
    tokenizer = load_tokenizer("gym-nano")
    tiny_model(kind, vocab_size=len(tokenizer)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.mark.parametrize(
    "kind",
    [
        "gemma2",
        "mamba",
        *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("bloom", "gpt_oss", "gptj", "mpt")),
    ],
)
def test_a_class_without_torchs_attention_is_loaded_and_trained(kind: str, tmp_path: Path) -> None:
    folder = saved(kind, tmp_path / "model")
    loaded = load_model(str(folder))
    assert loaded.model.config._attn_implementation == "eager"
    ids = torch.tensor([[5, 6, 7, 8]])
    expected = tiny_model(kind, vocab_size=len(loaded.tokenizer))
    with torch.no_grad():
        torch.testing.assert_close(loaded.model(input_ids=ids).logits, expected(input_ids=ids).logits)
    config = settings(tmp_path / "run", model=str(folder), finetuning="full", max_steps=1, learning_rate=1e-4)
    result = Trainer(config).train(generate("copy", 8))
    assert (result.steps, result.losses[0] > 0) == (1, True)


def test_a_class_with_it_has_it_and_a_choice_is_kept(tmp_path: Path) -> None:
    folder = str(saved("llama", tmp_path))
    assert load_model(folder).model.config._attn_implementation == "sdpa"
    chosen = load_model(folder, arguments={"attn_implementation": "eager"})
    assert chosen.model.config._attn_implementation == "eager"


@pytest.mark.parametrize(("kind", "reported"), [("gemma2", True), ("mamba", False), ("llama", False)])
def test_eager_attention_in_place_of_torchs_is_reported_once_if_the_model_has_attention(
    kind: str, reported: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = str(saved(kind, tmp_path))
    load_model(folder)
    load_model(folder)
    assert caplog.text.count("has no SDPA attention; using eager") == reported
    assert ("use shorter rows" in caplog.text) is reported


@pytest.mark.parametrize(
    "kind", ["gemma2", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("mamba", "gptj"))]
)
def test_an_attention_that_the_class_lacks_is_refused_with_its_own(kind: str, tmp_path: Path) -> None:
    folder = saved(kind, tmp_path / "model")
    config = settings(tmp_path / "run", model=str(folder), finetuning="full", max_steps=1, attention="sdpa")
    with pytest.raises(GymError, match=r"does not support sdpa") as caught:
        Trainer(config).train(generate("copy", 8))
    assert caught.value.code is ErrorCode.MODEL_INVALID
    assert "it uses eager" in str(caught.value.hint)
