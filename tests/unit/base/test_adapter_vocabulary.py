"""Adapters with a tokenizer in their folder: added tokens are used, and other ids are refused by name."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file

from gym_fed.base.models import load_model, load_tokenizer
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.export.source import open_source
from tests.support.added_tokens import save_with_tokens


def save_adapter(base: Path, folder: Path, tokenizer: Any, rows: int | None = None) -> Any:
    """Save an adapter of ``base``, and a tokenizer, with embeddings of ``rows`` if given."""
    model: Any = load_model(str(base)).model
    if rows is not None:
        model.resize_token_embeddings(rows, mean_resizing=False)
    adapted = get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj"]))
    torch.manual_seed(0)
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.1)
    adapted.save_pretrained(folder, save_embedding_layers=rows is not None)
    tokenizer.save_pretrained(folder)
    return adapted.eval()


def test_an_adapter_with_resized_embeddings_is_loaded_with_its_own_tokenizer(
    tmp_path: Path, tiny_base: Path
) -> None:
    tokenizer = load_tokenizer(str(tiny_base))
    tokenizer.add_tokens(["<think>"])
    adapted = save_adapter(tiny_base, tmp_path / "run", tokenizer, rows=len(tokenizer))
    loaded = load_model(str(tmp_path / "run"))
    ids = torch.tensor([tokenizer("<think> a")["input_ids"]])
    assert loaded.tokenizer("<think> a")["input_ids"] == ids[0].tolist()
    with torch.inference_mode():
        assert torch.equal(loaded.model(ids).logits, adapted(ids).logits)
    assert open_source(str(tmp_path / "run")).tokenizer.get_vocab() == tokenizer.get_vocab()


def test_an_added_token_without_a_row_is_reported_and_leaves_the_tokenizer_of_the_base(
    tmp_path: Path, tiny_base: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tokenizer = load_tokenizer(str(tiny_base))
    tokenizer.add_tokens(["<unused>"])
    save_adapter(tiny_base, tmp_path / "run", tokenizer)
    with caplog.at_level(logging.WARNING):
        loaded = load_model(str(tmp_path / "run"))
    assert "'<unused>'" in caplog.text
    assert loaded.tokenizer.get_vocab() == load_tokenizer(str(tiny_base)).get_vocab()


def test_an_adapter_with_a_tokenizer_of_other_ids_is_refused_by_the_first_token(
    tmp_path: Path, tiny_base: Path
) -> None:
    save_with_tokens(tiny_base, tmp_path / "base", ["one", "two"])
    save_with_tokens(tiny_base, tmp_path / "other", ["two", "one"])
    save_adapter(tmp_path / "base", tmp_path / "run", load_tokenizer(str(tmp_path / "other")))
    for load in (load_model, open_source):
        with pytest.raises(GymError, match="the first is 'one'") as error:
            load(str(tmp_path / "run"))
        assert error.value.code is ErrorCode.BASE_MISMATCH


def test_an_adapter_adds_tokens_and_cannot_rewrite_prompts(tmp_path: Path, tiny_base: Path) -> None:
    tokenizer = load_tokenizer(str(tiny_base))
    tokenizer.add_tokens(["<think>"])
    save_adapter(tiny_base, tmp_path / "run", tokenizer, rows=len(tokenizer))
    file = tmp_path / "run" / "tokenizer.json"
    values = json.loads(file.read_text())
    values["normalizer"] = {"type": "Replace", "pattern": {"String": "safe"}, "content": "evil"}
    file.write_text(json.dumps(values))
    loaded = load_model(str(tmp_path / "run"))
    expected = load_tokenizer(str(tiny_base))("safe")["input_ids"]
    assert loaded.tokenizer("safe")["input_ids"] == expected
    assert "<think>" in loaded.tokenizer.get_vocab()


def test_an_adapter_with_rows_for_the_head_alone_is_refused_by_the_missing_matrix(
    tmp_path: Path, tiny_base: Path
) -> None:
    base: Any = load_model(str(tiny_base))
    base.model.lm_head.weight = torch.nn.Parameter(base.model.lm_head.weight.detach().clone())
    base.model.config.tie_word_embeddings = False
    base.model.save_pretrained(tmp_path / "base")
    base.tokenizer.save_pretrained(tmp_path / "base")
    tokenizer = load_tokenizer(str(tiny_base))
    tokenizer.add_tokens(["<think>"])
    save_adapter(tmp_path / "base", tmp_path / "run", tokenizer, rows=len(tokenizer))
    weights = tmp_path / "run" / "adapter_model.safetensors"
    kept = {key: value for key, value in load_file(weights).items() if "embed_tokens" not in key}
    save_file(kept, weights, {"format": "pt"})
    with pytest.raises(GymError, match=r"no such rows of model.embed_tokens.weight"):
        load_model(str(tmp_path / "run"))
