"""A model folder is loaded as one class, whoever loads it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Qwen3_5Config, Qwen3_5ForConditionalGeneration

from gym_fed.base.modeling.checkpoint import class_of
from gym_fed.base.modeling.model_class import class_for
from gym_fed.base.models import load_model, load_tokenizer
from gym_fed.delta.base import BaseSpec
from gym_fed.serving.base import load_base
from gym_fed.training.planning.sizes import model_of

TEXT: dict[str, Any] = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "layer_types": ["linear_attention", "full_attention"],
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 2,
    "max_position_embeddings": 64,
}
VISION: dict[str, Any] = {
    "depth": 1,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_heads": 2,
    "out_hidden_size": 16,
    "num_position_embeddings": 16,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of a type for which transformers has a class of text, too."""
    home = tmp_path_factory.mktemp("models") / "whole"
    tokenizer = load_tokenizer("gym-nano")
    config = Qwen3_5Config(text_config={**TEXT, "vocab_size": len(tokenizer)}, vision_config=VISION)
    torch.manual_seed(0)
    Qwen3_5ForConditionalGeneration(config).save_pretrained(home)
    tokenizer.save_pretrained(home)
    return home


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_model_with_a_class_of_text_has_one_digest_for_every_reader(folder: Path, dtype: str) -> None:
    plain, whole = (load_model(str(folder), images=images).model for images in (False, True))
    assert type(plain) is type(whole) is Qwen3_5ForConditionalGeneration
    wanted = BaseSpec.of(whole, "whole")
    assert BaseSpec.of(plain, "whole") == wanted
    served, _, base = load_base(str(folder), (), dtype)
    assert type(served) is Qwen3_5ForConditionalGeneration
    assert base.digest == wanted.digest


def test_a_config_of_a_model_with_a_class_of_text_is_planned_whole(folder: Path) -> None:
    model, config = load_model(str(folder)).model, Qwen3_5Config.from_pretrained(folder)
    assert class_of(config) is None
    assert type(model_of(config)) is type(model)


@pytest.mark.parametrize("named", ["AutoTokenizer", "pipeline", "no_such_name", "CLIPModel"])
def test_a_config_can_name_no_class_but_a_models(named: str, tmp_path: Path) -> None:
    import transformers

    values = {"model_type": "clip", "vision_config": {}, "architectures": [named]}
    (tmp_path / "config.json").write_text(json.dumps(values))
    expected = transformers.CLIPModel if named == "CLIPModel" else transformers.AutoModelForMultimodalLM
    assert class_for(tmp_path) is expected
