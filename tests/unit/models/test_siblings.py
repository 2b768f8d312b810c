"""The siblings of public models are handled as the published files would be: class, tokenizer, template, weights."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from gym_fed.models import load_model, load_tokenizer
from tests.support.siblings import SIBLINGS, make_sibling
from tests.support.siblings.text import TEXT

BEGINNING = {
    "llama3": "<|begin_of_text|>",
    "gemma3": "<bos>",
    "mistral": "<s>",
    "mixtral": "<s>",
    "deepseek": "<｜begin▁of▁sentence｜>",
}
"""What the tokenizer itself puts before a text."""


@pytest.mark.parametrize("kind", TEXT)
def test_a_sibling_loads_as_the_published_class_with_every_weight(kind: str, tmp_path: Path) -> None:
    folder = make_sibling(kind, tmp_path / kind)
    published = json.loads((folder / "config.json").read_text())
    loaded = load_model(str(folder), dtype="bfloat16")
    assert type(loaded.model).__name__ == published["architectures"][0]
    assert loaded.model.config.tie_word_embeddings == published.get("tie_word_embeddings", True)
    assert loaded.model.config.vocab_size > len(loaded.tokenizer), "as published: words without a token"
    with safe_open(str(folder / "model.safetensors"), "pt") as file:
        stored = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    assert {tensor.dtype for tensor in stored.values()} == {torch.bfloat16}
    assert ("lm_head.weight" in stored) is not loaded.model.config.tie_word_embeddings
    words = loaded.model.get_input_embeddings().weight
    assert torch.equal(words, stored["model.embed_tokens.weight"])
    again = make_sibling(kind, tmp_path / "again")
    assert (again / "tokenizer.json").read_bytes() == (folder / "tokenizer.json").read_bytes()


@pytest.mark.parametrize("kind", SIBLINGS)
def test_a_siblings_tokenizer_gives_a_text_back_and_keeps_its_special_tokens_whole(
    kind: str, tmp_path: Path
) -> None:
    folder = make_sibling(kind, tmp_path / kind)
    tokenizer = load_tokenizer(str(folder))
    text = "The capital of Peru is Lima.\n  ¿Qué? 🏠"
    ids = tokenizer(text)["input_ids"]
    assert tokenizer.decode(ids, skip_special_tokens=True).removeprefix(" ") == text
    first = tokenizer.convert_ids_to_tokens(ids[0])
    assert first == BEGINNING.get(kind.removesuffix("_8b").removesuffix("_vision"), first)
    for token in SIBLINGS[kind].words.special:
        found = tokenizer(token, add_special_tokens=False)["input_ids"]
        assert found[-1] == tokenizer.convert_tokens_to_ids(token), token
    assert all(tokenizer.convert_tokens_to_ids(token) is not None for token in SIBLINGS[kind].ends)


def test_experts_are_stored_one_by_one_as_published(tmp_path: Path) -> None:
    with safe_open(str(make_sibling("qwen3_moe", tmp_path) / "model.safetensors"), "pt") as file:
        names = set(file.keys())
    assert {f"model.layers.1.mlp.experts.{n}.down_proj.weight" for n in range(8)} <= names
    assert "model.layers.0.mlp.gate.weight" in names
