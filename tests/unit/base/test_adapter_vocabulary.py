"""Adapters with a tokenizer in their folder: added tokens are used, and other ids are refused by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model

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


def test_an_added_token_without_a_row_leaves_the_tokenizer_of_the_base(
    tmp_path: Path, tiny_base: Path
) -> None:
    tokenizer = load_tokenizer(str(tiny_base))
    tokenizer.add_tokens(["<unused>"])
    save_adapter(tiny_base, tmp_path / "run", tokenizer)
    loaded = load_model(str(tmp_path / "run"))
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
