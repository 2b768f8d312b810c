"""A GGUF file becomes the model folder that it was made of, or is refused by name."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from gym_fed.base.imports.folder import imported
from gym_fed.base.imports.gguf.header import read_header
from gym_fed.base.models import load_model, load_tokenizer, quiet_loading
from gym_fed.core.errors import ErrorCode, GymError
from tests.support.gguf_files import write_gguf

pytest.importorskip("gguf", reason="the extra export is not installed")

TEXTS = (
    "What is the capital of Peru?",
    "  two  spaces\n\nand 12345 numbers",
    "naïve 中文 🙂 it's",
    "<|im_start|>user\nhi<|im_end|>",
    "<|start_header_id|>user<|end_header_id|>\n\nhi<|eot_id|>",
)


def parameters(folder: Path) -> dict[str, torch.Tensor]:
    """Of a model as transformers loads it, which must have had no reason to complain."""
    from transformers import AutoModelForCausalLM

    with quiet_loading():
        model, info = AutoModelForCausalLM.from_pretrained(
            str(folder), dtype="auto", output_loading_info=True
        )
    assert not any(info.values())
    return dict(model.state_dict())


def refused(source: Path) -> GymError:
    with pytest.raises(GymError) as caught:
        imported(source)
    assert not list((source.parent / "home" / "imports").glob("[0-9a-f]*"))
    return caught.value


def test_plain_numbers_come_back_bit_by_bit_with_tokens_template_and_licence(
    family: Path, tmp_path: Path
) -> None:
    from gym_fed.base.files import licence_of

    folder = imported(write_gguf(family, tmp_path / "model.gguf"))
    wanted, found = parameters(family), parameters(folder)
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        assert torch.equal(found[name], value.float()), name
    one, other = load_tokenizer(str(family)), load_tokenizer(str(folder))
    for text in TEXTS:
        ids = one(text)["input_ids"][one(text)["input_ids"][0] == one.bos_token_id :]
        assert other(text)["input_ids"] == ids
        assert other.decode(ids) == one.decode(ids)
    assert other.chat_template == one.chat_template
    assert licence_of(folder) == "apache-2.0"
    assert json.loads((folder / "generation_config.json").read_text())["eos_token_id"] == one.eos_token_id


def test_the_logits_are_those_of_the_source(family: Path, tmp_path: Path) -> None:
    one = load_model(str(family)).model
    other = load_model(str(write_gguf(family, tmp_path / "model.gguf"))).model
    ids = torch.arange(3, 43)[None]
    with torch.no_grad():
        assert torch.equal(one(ids).logits, other(ids).logits)


def test_quantised_tensors_are_those_of_ggufs_own_dequantisation(qwen3: Path, tmp_path: Path) -> None:
    import gguf

    file = write_gguf(qwen3, tmp_path / "model.gguf", kind="q8_0")
    found = parameters(imported(file))
    tensors = {one.name: one for one in gguf.GGUFReader(file).tensors}
    for stored, name in {
        "token_embd.weight": "model.embed_tokens.weight",
        "blk.1.ffn_down.weight": "model.layers.1.mlp.down_proj.weight",
        "blk.0.attn_k.weight": "model.layers.0.self_attn.k_proj.weight",
    }.items():
        wanted = gguf.quants.dequantize(tensors[stored].data, tensors[stored].tensor_type)
        assert torch.equal(found[name], torch.from_numpy(wanted).half())
    config = json.loads((imported(file) / "config.json").read_text())
    assert (config["dtype"], config["head_dim"]) == ("float16", 16)


@pytest.mark.parametrize(
    ("changes", "code", "said"),
    [
        (
            {"without": ("blk.1.attn_v.weight",)},
            ErrorCode.MODEL_INVALID,
            "lacks model.layers.1.self_attn.v_proj",
        ),
        ({"more": ("blk.0.attn_sinks.weight",)}, ErrorCode.MODEL_INVALID, "blk.0.attn_sinks.weight (1 of"),
        ({"keys": {"qwen3.attention.scale": 2}}, ErrorCode.MODEL_INVALID, "qwen3.attention.scale"),
        ({"keys": {"qwen3.expert_count": 4}}, ErrorCode.MODEL_INVALID, "qwen3.expert_count is 4"),
        ({"keys": {"qwen3.block_count": 999_999}}, ErrorCode.MODEL_INVALID, "qwen3.block_count is 999999"),
        ({"keys": {"qwen3.embedding_length": 64}}, ErrorCode.MODEL_INVALID, "is expected"),
        ({"keys": {"qwen3.rope.scaling.type": "ntk"}}, ErrorCode.MODEL_INVALID, "rope.scaling.type is ntk"),
        ({"keys": {"general.type": "adapter"}}, ErrorCode.UNAVAILABLE, "is a LoRA adapter"),
        ({"keys": {"general.type": "mmproj"}}, ErrorCode.UNAVAILABLE, "is an image projector"),
        ({"keys": {"tokenizer.ggml.pre": "new-one"}}, ErrorCode.MODEL_INVALID, "pre-tokenizer 'new-one'"),
        ({"keys": {"tokenizer.ggml.model": "bert"}}, ErrorCode.MODEL_INVALID, "tokenizer model 'bert'"),
        ({"keys": {"tokenizer.ggml.eos_token_id": 99_999}}, ErrorCode.MODEL_INVALID, "eos_token_id is 99999"),
    ],
)
def test_what_would_become_another_model_is_refused_by_name_and_nothing_is_kept(
    qwen3: Path, tmp_path: Path, changes: dict[str, Any], code: ErrorCode, said: str
) -> None:
    error = refused(write_gguf(qwen3, tmp_path / "model.gguf", **changes))
    assert error.code is code
    assert said in error.message


def test_an_architecture_that_is_not_read_is_refused_with_those_that_are(tmp_path: Path) -> None:
    import gguf

    writer = gguf.GGUFWriter(tmp_path / "model.gguf", "mamba")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    error = refused(tmp_path / "model.gguf")
    assert error.code is ErrorCode.UNAVAILABLE
    assert "'mamba'" in error.message
    assert "llama, qwen2, qwen3" in error.hint


def test_a_scale_that_is_not_finite_is_refused_with_its_tensor(qwen3: Path, tmp_path: Path) -> None:
    file = write_gguf(qwen3, tmp_path / "model.gguf", kind="q8_0")
    stored = read_header(file).tensors["blk.0.ffn_up.weight"]
    with file.open("r+b") as stream:
        stream.seek(stored.start)
        stream.write(b"\x00\x7c")  # the first block's scale: infinity in float16
    assert "blk.0.ffn_up.weight has values that are not finite" in refused(file).message


def test_parts_are_read_together_and_a_missing_one_is_named(qwen3: Path, tmp_path: Path) -> None:
    for number, (keeps, keys) in enumerate(((0, {}), (1, {})), start=1):
        whole = read_header(write_gguf(qwen3, tmp_path / "whole.gguf"))
        others = tuple(name for n, name in enumerate(whole.tensors) if n % 2 != keeps)
        write_gguf(
            qwen3,
            tmp_path / f"model-0000{number}-of-00002.gguf",
            keys={**keys, "split.count": 2, "split.no": number - 1},
            without=others,
        )
    found = parameters(imported(tmp_path / "model-00001-of-00002.gguf"))
    assert all(torch.equal(found[name], value.float()) for name, value in parameters(qwen3).items())
    (tmp_path / "model-00002-of-00002.gguf").unlink()
    with pytest.raises(GymError, match=r"model-00002-of-00002\.gguf: no such file"):
        imported(tmp_path / "model-00001-of-00002.gguf")
    shutil.move(tmp_path / "model-00001-of-00002.gguf", tmp_path / "part.gguf")
    with pytest.raises(GymError, match="is one of 2 parts, but the folder has 1"):
        imported(tmp_path / "part.gguf")


def test_without_the_package_the_line_that_installs_it_is_named(
    qwen3_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gym_fed.base.imports.gguf.reader.find_spec", lambda _name: None)
    with pytest.raises(GymError, match="needs the package gguf") as caught:
        imported(qwen3_file)
    assert caught.value.code is ErrorCode.MISSING_DEPENDENCY
    assert "gym-fed[export]" in caught.value.hint
