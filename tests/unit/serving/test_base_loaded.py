"""The base in its serving dtype has the digest of its float32 weights, and the same weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from gym_fed.base.modeling.checkpoint import Checkpoint
from gym_fed.base.models import load_model, load_tokenizer, nano_path
from gym_fed.delta.base import BaseSpec
from gym_fed.serving.base import checkpoint_digest, load_base


def saved(folder: Path, *, tied: bool = False, dtype: str = "float32", **options: Any) -> Path:
    """A small Llama in a folder with gym-nano's tokenizer."""
    torch.manual_seed(1)
    config = LlamaConfig(
        vocab_size=512,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=tied,
    )
    LlamaForCausalLM(config).to(getattr(torch, dtype)).save_pretrained(folder, **options)
    load_tokenizer("gym-nano").save_pretrained(folder)
    return folder


def require_same(name: str, dtype: str) -> None:
    """Digest, weights and settings are those of a model that was loaded in float32 and converted."""
    reference = load_model(name).model
    digest = BaseSpec.of(reference, name).digest
    model, _, base = load_base(name, [], dtype)
    assert base.digest == digest
    assert base.shapes == {key: tuple(one.shape) for key, one in reference.named_parameters()}
    reference = reference.to(getattr(torch, dtype))
    for (name_a, one), (name_b, other) in zip(
        reference.named_parameters(), model.named_parameters(), strict=True
    ):
        assert name_a == name_b
        assert one.dtype == other.dtype == getattr(torch, dtype)
        assert torch.equal(one, other)
    assert model.generation_config.to_dict() == reference.generation_config.to_dict()
    assert model.config.to_dict() == reference.config.to_dict() | {"dtype": model.config.to_dict()["dtype"]}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_gym_nano_has_the_digest_of_its_float32_weights_in_every_type(dtype: str) -> None:
    require_same("gym-nano", dtype)


@pytest.mark.parametrize("written", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("tied", [False, True])
def test_a_checkpoint_of_any_type_with_a_head_of_its_own_or_tied_has_the_same_digest(
    tmp_path: Path, written: str, tied: bool
) -> None:
    folder = saved(tmp_path / "model", tied=tied, dtype=written)
    require_same(str(folder), "bfloat16")
    checkpoint = Checkpoint.find(folder)
    assert checkpoint is not None
    assert checkpoint.is_in(torch.bfloat16) is (written == "bfloat16")


def test_a_checkpoint_in_shards_has_the_same_digest(tmp_path: Path) -> None:
    folder = saved(tmp_path / "model", max_shard_size="20KB")
    assert len(list(folder.glob("model-*.safetensors"))) > 1
    require_same(str(folder), "bfloat16")


def test_blocks_smaller_than_a_tensor_give_the_same_digest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gym_fed.base.modeling.tensor_files.BLOCK_WEIGHTS", 1000)
    require_same("gym-nano", "bfloat16")


def test_weights_that_are_not_the_files_own_give_no_digest() -> None:
    checkpoint = Checkpoint.find(nano_path())
    assert checkpoint is not None
    model = load_model("gym-nano", dtype="bfloat16").model
    assert (
        checkpoint_digest(model, checkpoint) == BaseSpec.of(load_model("gym-nano").model, "gym-nano").digest
    )
    with torch.no_grad():
        next(iter(model.parameters())).view(-1)[-1] += 1
    assert checkpoint_digest(model, checkpoint) is None


def test_a_folder_without_readable_weights_has_no_checkpoint(tmp_path: Path) -> None:
    assert Checkpoint.find(tmp_path) is None
    (tmp_path / "model.safetensors").write_bytes(b"x" * 100)
    assert Checkpoint.find(tmp_path) is None
    (tmp_path / "model.safetensors").unlink()
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "gone"}}))
    assert Checkpoint.find(tmp_path) is None


def test_a_base_that_is_loaded_in_float32_first_is_reported(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    folder = str(saved(tmp_path))
    load_base(folder, [], "bfloat16")
    assert "first loaded in float32" not in caplog.text
    monkeypatch.setattr(Checkpoint, "find", lambda folder: None)
    load_base(folder, [], "bfloat16")
    assert "is first loaded in float32, which takes three times its memory" in caplog.text
