"""Sizes of config.json that the weights do not have, and what is no file in a file's place: refused at once."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from gym_fed.base.modeling.config_checks import require_sizes
from gym_fed.base.modeling.tensor_files import tensor_shapes
from gym_fed.base.models import load_model, load_tokenizer, nano_path, resolve
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.core.json_files import read_object
from gym_fed.serving.base import load_base, spec_of_files
from gym_fed.training.model.architecture import read_config


def changed(folder: Path, **keys: Any) -> Path:
    """gym-nano with other values in its config; None leaves a key out."""
    shutil.copytree(nano_path(), folder, copy_function=shutil.copyfile)
    config = json.loads((folder / "config.json").read_text()) | keys
    (folder / "config.json").write_text(json.dumps({k: v for k, v in config.items() if v is not None}))
    return folder


NUMBERS = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *((key, "x") for key in (*NUMBERS, "max_position_embeddings")),
        *(("hidden_size", value) for value in (0, -5, 10**12, 1.5, True, [4])),
    ],
    ids=str,
)
def test_what_is_no_size_is_refused_by_file_and_key(tmp_path: Path, key: str, value: Any) -> None:
    folder = changed(tmp_path / "model", **{key: value})
    with pytest.raises(GymError, match=rf"config\.json: {key} is ") as refused:
        load_base(str(folder), [], "float32", plain=True)
    assert refused.value.code is ErrorCode.MODEL_INVALID
    assert refused.value.hint


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("num_labels", 10**12),
        ("num_beams", 10**6),
        ("layer_types", ["x"] * 70_000),
        ("quantization_config", [1]),
    ],
    ids=lambda value: str(value)[:40],
)
@pytest.mark.parametrize("act", [load_model, load_tokenizer, read_config])
@pytest.mark.parametrize("section", [None, "text_config"])
def test_a_config_that_fills_the_memory_is_refused_by_every_reader(
    tmp_path: Path, key: str, value: Any, act: Any, section: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("transformers.AutoConfig.from_pretrained", lambda *_, **__: pytest.fail("read"))
    folder = changed(tmp_path / "model", **({key: value} if section is None else {section: {key: value}}))
    with pytest.raises(GymError, match=rf"config\.json: {key} ") as refused:
        act(str(folder))
    assert refused.value.code is ErrorCode.MODEL_INVALID


@pytest.mark.parametrize(
    "names", ["flash_attention_2", "flex_attention", "somebody/kernel", {"": "somebody/kernel"}], ids=str
)
def test_an_attention_that_a_config_names_is_not_used(tmp_path: Path, names: Any) -> None:
    """Real configs name FlashAttention, which most machines lack."""
    folder = changed(tmp_path / "model", _attn_implementation=names, _experts_implementation=names)
    model = load_model(str(folder)).model
    assert model.config._attn_implementation == "sdpa"
    assert read_config(str(folder))._attn_implementation is None


def test_a_generation_config_with_a_million_beams_is_refused(tmp_path: Path) -> None:
    folder = changed(tmp_path / "model")
    (folder / "generation_config.json").unlink(missing_ok=True)
    (folder / "generation_config.json").write_text('{"num_return_sequences": 1000000}')
    with pytest.raises(GymError, match=r"generation_config\.json: num_return_sequences is 1e\+06"):
        load_model(str(folder))


@pytest.mark.parametrize("key", NUMBERS)
@pytest.mark.parametrize("value", [10**8, 1000])
@pytest.mark.parametrize("bits", [None, {"quant_method": "x"}], ids=["", "quantised"])
def test_a_size_that_the_weights_do_not_have_is_refused_before_anything_is_built(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, key: str, value: int, bits: Any
) -> None:
    def built(*_: Any) -> None:
        raise AssertionError("it was built")

    monkeypatch.setattr("gym_fed.serving.base._plain", built)
    monkeypatch.setattr("gym_fed.serving.base.load_model", built)
    folder = str(changed(tmp_path / "model", quantization_config=bits, **{key: value}))
    if bits is not None and key != "num_hidden_layers":  # packed weights have other shapes
        require_sizes(Path(folder))
        return
    blamed = "num_(attention|key_value)_heads" if key == "head_dim" else key
    with pytest.raises(GymError, match=rf"config\.json: {blamed} is .*the weights") as refused:
        load_base(folder, [], "float32", plain=True)
    assert refused.value.code is ErrorCode.MODEL_INVALID


def test_other_readers_of_a_model_refuse_it_too(tmp_path: Path) -> None:
    folder = changed(tmp_path / "model", num_hidden_layers=10**8)
    with pytest.raises(GymError, match="num_hidden_layers is 100,000,000, but the weights have"):
        load_model(str(folder))
    assert spec_of_files(folder, "x") is None


def test_fewer_layers_than_the_files_have_are_a_models_own_business(tmp_path: Path) -> None:
    require_sizes(changed(tmp_path / "model", num_hidden_layers=1))


@pytest.mark.parametrize("section", [False, True])
@pytest.mark.parametrize(
    ("key", "value"), [("num_hidden_layers", 10**8), ("n_layer", 1001), ("hidden_size", 10**12)]
)
def test_a_type_that_is_not_known_is_held_to_what_any_model_of_its_files_may_have(
    tmp_path: Path, section: bool, key: str, value: int
) -> None:
    own = {key: value}
    folder = changed(tmp_path / "model", model_type="gemma", **({"text_config": own} if section else own))
    with pytest.raises(GymError, match=rf"{key} is .*, more than the weights"):
        require_sizes(folder)
    require_sizes(changed(tmp_path / "other", model_type="gemma", num_hidden_layers=999, hidden_size=10**4))


def test_a_value_that_transformers_refuses_is_refused_by_file_and_field(tmp_path: Path) -> None:
    folder = changed(tmp_path / "model", initializer_range="wide")
    with pytest.raises(GymError, match=r"config\.json: .*initializer_range") as refused:
        load_model(str(folder))
    assert refused.value.code is ErrorCode.MODEL_INVALID
    with pytest.raises(GymError, match=r"config\.json: .*initializer_range"):
        load_base(str(folder), [], "bfloat16")


def test_weights_of_another_size_than_the_config_says_are_refused(tmp_path: Path) -> None:
    folder = changed(tmp_path / "model")
    weights = load_file(folder / "model.safetensors")
    weights["model.norm.weight"] = torch.ones(7)
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(GymError, match=r"differ in size from config\.json") as refused:
        load_base(str(folder), [], "float32", plain=True)
    assert refused.value.code is ErrorCode.MODEL_INVALID


def test_a_folder_without_readable_files_is_left_to_its_reader(tmp_path: Path) -> None:
    require_sizes(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "llama", "hidden_size": 8}')
    require_sizes(tmp_path)
    assert tensor_shapes(tmp_path) is None


needs_pipes = pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="this system has no named pipes")


@needs_pipes
@pytest.mark.timeout(60)
@pytest.mark.parametrize("linked", [False, True])
@pytest.mark.parametrize(
    "name",
    ["tokenizer.json", "tokenizer_config.json", "generation_config.json", "model.safetensors", "x/a.jinja"],
)
def test_a_named_pipe_in_the_place_of_a_file_is_refused_by_its_name(
    tmp_path: Path, name: str, linked: bool
) -> None:
    folder = changed(tmp_path / "model")
    file = folder / name.replace("x/", "additional_chat_templates/")
    file.parent.mkdir(exist_ok=True)
    file.unlink(missing_ok=True)
    os.mkfifo(tmp_path / "pipe" if linked else file)
    if linked:
        file.symlink_to(tmp_path / "pipe")
    for act in (resolve, load_tokenizer, lambda name: load_base(name, [], "float32", plain=True)):
        with pytest.raises(GymError, match=rf"{file.name} cannot be read: not a regular file") as refused:
            act(str(folder))
        assert refused.value.code is ErrorCode.MODEL_INVALID


@needs_pipes
@pytest.mark.timeout(60)
def test_json_is_read_of_ordinary_files_alone(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for place in (tmp_path / "pipe", Path("/dev/zero")):
        with pytest.raises(GymError, match=f"{place} cannot be read: not a regular file"):
            read_object(place)
    with pytest.raises(IsADirectoryError):
        read_object(tmp_path)
    (tmp_path / "real").write_text('{"a": 1}')
    (tmp_path / "link").symlink_to(tmp_path / "real")
    assert read_object(tmp_path / "link") == {"a": 1}


def test_links_to_ordinary_files_as_the_hub_s_cache_has_them_are_followed(tmp_path: Path) -> None:
    (tmp_path / "linked").mkdir()
    for file in nano_path().iterdir():
        (tmp_path / "linked" / file.name).symlink_to(file)
    (tmp_path / "linked" / "gone.json").symlink_to(tmp_path / "nothing")
    assert resolve(str(tmp_path / "linked")) == str(tmp_path / "linked")
