"""The siblings of public models are handled as the published files would be: class, tokenizer, template, weights."""

from __future__ import annotations

import importlib.util
import json
from itertools import groupby
from pathlib import Path

import pytest
import torch
from PIL import Image
from safetensors import safe_open

from gym_fed.base.modeling.processors import load_vision_model
from gym_fed.base.models import load_model, load_tokenizer
from gym_fed.core.errors import GymError
from gym_fed.data.encoding import IGNORED, encode_one
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


def learned(kind: str, folder: Path) -> list[str]:
    """The assistant's words of two turns, in runs, as the sibling's own template writes them."""
    messages = [
        *({"role": "user", "content": "9 * 2?"}, {"role": "assistant", "content": "18."}),
        *({"role": "user", "content": "Sure?"}, {"role": "assistant", "content": "Yes."}),
    ]
    tokenizer = load_tokenizer(str(make_sibling(kind, folder)))
    labels = encode_one(tokenizer, {"messages": messages})["labels"]
    runs = [list(run) for wanted, run in groupby(labels, lambda label: label != IGNORED) if wanted]
    return [tokenizer.decode(run) for run in runs]


@pytest.mark.parametrize(
    ("kind", "first", "last"),
    [
        ("phi4_mini", "18.<|end|>", "Yes.<|end|><|endoftext|>"),  # ends the conversation alone
        ("mixtral", "18.</s>", "Yes.</s>"),
        ("smollm2", "18.<|im_end|>", "Yes.<|im_end|>"),
        ("deepseek_llama", "18.<｜end▁of▁sentence｜>", "Yes.<｜end▁of▁sentence｜>"),
    ],
)
def test_every_answer_of_a_conversation_is_learned_with_its_end(
    kind: str, first: str, last: str, tmp_path: Path
) -> None:
    assert [words.strip() for words in learned(kind, tmp_path)] == [first, last]


@pytest.mark.skipif(importlib.util.find_spec("torchvision") is not None, reason="torchvision loads films")
@pytest.mark.parametrize("kind", ["qwen2_vl", "qwen2_5_vl", "qwen3_vl"])
def test_without_torchvision_pictures_are_prepared_and_films_are_refused(kind: str, tmp_path: Path) -> None:
    folder = make_sibling(kind, tmp_path / "model")
    _, processor = load_vision_model(str(folder), dtype="bfloat16", arguments={})
    picture = Image.new("RGB", (56, 28), (200, 20, 20))
    batch = processor(images=[picture], text=["<|image_pad|>"], return_tensors="pt")
    assert batch["image_grid_thw"].tolist() == [[1, 2, 4]], "28 pixels make two patches"
    assert batch["input_ids"].shape == (1, 2), "four patches make one token"
    with pytest.raises(GymError, match="videos need the package torchvision"):
        processor.video_processor(videos=[[picture] * 2])
    processor.save_pretrained(tmp_path / "saved")
    saved = json.loads((tmp_path / "saved/processor_config.json").read_text())
    assert saved["video_processor"]["patch_size"] == 14, "for a machine that has torchvision"


@pytest.mark.parametrize("kind", ["llava", "qwen2_vl"])
def test_a_model_of_pictures_is_refused_by_name_where_text_models_are_loaded(
    kind: str, tmp_path: Path
) -> None:
    with pytest.raises(GymError, match=f"is a {kind} model, which reads images"):
        load_model(str(make_sibling(kind, tmp_path)))
