"""A base without transformers' classes has the same weights, digest and logits; others are left to transformers."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from gym_fed.base.models import load_tokenizer
from gym_fed.serving.base import load_base
from gym_fed.serving.forward.chunk import Chunk
from gym_fed.serving.forward.multi_variant import MultiVariantModel
from gym_fed.serving.forward.plain_config import plain_config
from gym_fed.serving.forward.plain_model import PlainModel, plain_layout
from gym_fed.serving.forward.target_modules import ModelLayout
from tests.unit.serving.test_decoder import MODELS, build, texts

HELD = ("llama", "llama biases", "qwen2", "qwen3", "mistral no window")


def saved(folder: Path, name: str, dtype: str = "float32") -> Path:
    build(name).to(getattr(torch, dtype)).save_pretrained(folder)
    load_tokenizer("gym-nano").save_pretrained(folder)
    return folder


def loaded(folder: Path, dtype: str, *, plain: bool) -> tuple[Any, Any]:
    model, _, base = load_base(str(folder), [], dtype, plain=plain)
    return model, base


@pytest.mark.parametrize("written", ["float32", "bfloat16"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", HELD)
def test_weights_digest_and_logits_are_those_of_transformers(
    tmp_path: Path, name: str, dtype: str, written: str
) -> None:
    folder = saved(tmp_path, name, written)
    (ours, base), (theirs, their_base) = (loaded(folder, dtype, plain=plain) for plain in (True, False))
    assert type(ours) is PlainModel
    assert type(theirs) is not PlainModel
    assert base == their_base
    ids = torch.tensor(texts(30))
    places = torch.arange(30)[None]
    with torch.inference_mode():
        found = ours(input_ids=ids, position_ids=places).logits
        wanted = theirs(input_ids=ids, position_ids=places, use_cache=False).logits
    assert found.dtype == wanted.dtype
    tolerance = 1e-5 if dtype == "float32" else 1e-2
    assert (found - wanted).norm() <= tolerance * wanted.norm()


@pytest.mark.parametrize("name", HELD)
def test_steps_are_those_of_a_transformers_model(tmp_path: Path, name: str) -> None:
    folder = saved(tmp_path, name)
    logits = []
    for plain in (True, False):
        model, _ = loaded(folder, "float32", plain=plain)
        with MultiVariantModel(model) as served:
            caches = [served.new_cache() for _ in range(2)]
            chunks = [
                Chunk(ids, cache, num_logits=len(ids))
                for ids, cache in zip(texts(7, 12), caches, strict=True)
            ]
            logits.append(served.step(chunks))
            assert served.forward == "decoder"
            assert served.layout.parameters.keys() == dict(model.named_parameters()).keys()
            layout = served.layout
    assert torch.equal(*logits)
    assert not any(one.refusal for one in layout.parameters.values())


@pytest.mark.parametrize("name", sorted(MODELS.keys() - set(HELD)))
def test_windows_and_stretched_ropes_are_loaded_by_transformers(tmp_path: Path, name: str) -> None:
    assert plain_config(saved(tmp_path, name)) is None
    assert type(loaded(tmp_path, "float32", plain=True)[0]) is not PlainModel


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("architectures", ["LlamaModel"]),
        ("model_type", ["llama"]),
        ("hidden_act", "gelu"),
        ("quantization_config", {"bits": 4}),
        ("auto_map", {"AutoModel": "x.y"}),
        ("rms_norm_eps", None),
        ("tie_word_embeddings", None),
        ("num_key_value_heads", 3),
        ("num_key_value_heads", True),
        ("num_hidden_layers", 0),
        ("vocab_size", 1 << 40),
        ("head_dim", 7),
        ("rope_parameters", {"rope_type": "default"}),
        ("rope_parameters", {"rope_type": "default", "rope_theta": 1e4, "factor": 2.0}),
        ("rope_parameters", "default"),
    ],
)
def test_a_config_that_says_anything_else_is_left_to_transformers(
    tmp_path: Path, key: str, value: object
) -> None:
    build("llama").save_pretrained(tmp_path)
    file = tmp_path / "config.json"
    assert plain_config(tmp_path) is not None
    file.write_text(json.dumps(json.loads(file.read_text()) | {key: value}))
    assert plain_config(tmp_path) is None


def test_an_adapters_folder_and_a_file_that_is_no_config_are_left_to_transformers(tmp_path: Path) -> None:
    build("llama").save_pretrained(tmp_path)
    (tmp_path / "adapter_config.json").write_text("{}")
    assert plain_config(tmp_path) is None
    (tmp_path / "adapter_config.json").unlink()
    (tmp_path / "config.json").write_text("[]")
    assert plain_config(tmp_path) is None


def test_weights_that_are_not_the_models_one_to_one_are_left_to_transformers(tmp_path: Path) -> None:
    model = build("llama")
    model.save_pretrained(tmp_path)
    config = plain_config(tmp_path)
    assert config is not None
    weights = dict(model.named_parameters())
    assert PlainModel.of(config, weights) is not None
    assert PlainModel.of(config, {**weights, "extra": weights["model.norm.weight"]}) is None
    name = "model.layers.1.mlp.up_proj.weight"
    assert PlainModel.of(config, {**weights, name: weights[name][1:]}) is None
    assert PlainModel.of(config, {key: one for key, one in weights.items() if key != name}) is None


def test_a_served_nano_imports_neither_transformers_nor_torchs_compiler() -> None:
    program = """
import sys
from gym_fed.config.serving import ServingConfig
from gym_fed.serving.openai.catalogue import LOCAL
from gym_fed.serving.setup import open_serving

with open_serving(ServingConfig(base="gym-nano", variants=None)) as serving:
    asked = {"model": serving.served_name, "prompt": "a", "max_tokens": 2, "top_p": 0.9}
    serving.service.handle("/v1/completions", asked, LOCAL)
heavy = ("torch._dynamo", "transformers", "accelerate", "sympy")
print([name for name in heavy if name in sys.modules])
serving.tokenizer.warm()
print([name for name in heavy if name in sys.modules])
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == ["[]", "['transformers']"]


@pytest.mark.parametrize("name", HELD)
def test_the_layout_is_what_running_the_model_shows(tmp_path: Path, name: str) -> None:
    folder = saved(tmp_path, name)
    (plain, _), (model, _) = (loaded(folder, "float32", plain=plain) for plain in (True, False))
    assert plain_layout(plain, "exact") == ModelLayout.of(model, "exact")
