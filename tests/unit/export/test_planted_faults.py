"""Faults that are planted in written files: the check of an export must find each, and name what differs."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.export.folder_files import compare_folder
from gym_fed.export.formats._few_bits import compare_packed
from gym_fed.export.formats.base import Options
from gym_fed.export.formats.onnx import Onnx
from gym_fed.export.formats.torch_export import TorchExport
from gym_fed.export.formats.torchscript import TorchScript
from gym_fed.export.program_weights import StoredWeight, compare_weights
from gym_fed.export.run import export
from gym_fed.export.source import Source, open_source
from tests.support.adapters import sibling
from tests.support.packed_weights import pack_layers

GROUP = 32
MOST_ERROR = 0.35
QUERY = "model.layers.0.self_attn.q_proj"


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Source:
    sizes: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 96, "tie_word_embeddings": True}
    return open_source(str(sibling("Llama", tmp_path_factory.mktemp("planted") / "base", **sizes)))


@pytest.fixture
def folder(source: Source, tmp_path: Path) -> Path:
    export(source, "huggingface", tmp_path / "out", Options(), check=False)
    return tmp_path / "out"


def change_json(file: Path, change: Callable[[dict[str, Any]], object]) -> None:
    values = json.loads(file.read_text())
    change(values)
    file.write_text(json.dumps(values))


def differs(call: Callable[[], object], *words: str) -> None:
    with pytest.raises(GymError) as raised:
        call()
    assert raised.value.code is ErrorCode.EXPORT_DIFFERS
    for word in words:
        assert word in raised.value.message


def test_a_folder_as_it_was_written_passes(source: Source, folder: Path) -> None:
    compared = compare_folder(folder, source, source.model)
    assert compared["settings"] > 20
    assert compared["entries"] > 256


@pytest.mark.parametrize(
    ("name", "change", "named"),
    [
        ("config.json", lambda it: it.update(rms_norm_eps=1e-5), "rms_norm_eps"),
        ("config.json", lambda it: it["rope_parameters"].update(rope_theta=500_000.0), "rope_parameters"),
        ("config.json", lambda it: it.update(max_position_embeddings=64), "max_position_embeddings"),
        ("config.json", lambda it: it.update(eos_token_id=3), "eos_token_id"),
        ("generation_config.json", lambda it: it.update(eos_token_id=3), "eos_token_id"),
        (
            "tokenizer.json",
            lambda it: it["added_tokens"][1].update(content="<|im_begin|>"),
            "added_tokens.1.content",
        ),
        ("tokenizer.json", lambda it: swap(it["model"]["vocab"], "A", "B"), "model.vocab.A"),
        ("tokenizer.json", lambda it: it["model"]["vocab"].pop("A"), "model.vocab.A nothing"),
        ("tokenizer.json", lambda it: it["model"]["merges"].append(["a", "b"]), "model.merges"),
        ("tokenizer.json", lambda it: it["pre_tokenizer"].update(add_prefix_space=True), "add_prefix_space"),
    ],
)
def test_a_wrong_entry_of_a_config_or_a_tokenizer_is_named(
    source: Source, folder: Path, name: str, change: Callable[[dict[str, Any]], object], named: str
) -> None:
    change_json(folder / name, change)
    differs(lambda: compare_folder(folder, source, source.model), name, named)


def swap(values: dict[str, Any], one: str, other: str) -> None:
    values[one], values[other] = values[other], values[one]


@pytest.mark.parametrize("name", ["config.json", "generation_config.json", "tokenizer.json"])
def test_a_missing_file_is_named(source: Source, folder: Path, name: str) -> None:
    (folder / name).unlink()
    differs(lambda: compare_folder(folder, source, source.model), name, "is missing")


def test_the_check_of_an_export_finds_a_fault_that_no_logit_shows(
    source: Source, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def write(_self: Any, target_source: Source, target: Path, _options: Options) -> None:
        target.mkdir(exist_ok=True)
        target_source.model.config.save_pretrained(target)
        target_source.model.generation_config.save_pretrained(target)
        target_source.write_companions(target)
        change_json(target / "config.json", lambda it: it.update(rms_norm_eps=1e-3))

    monkeypatch.setattr(TorchExport, "write", write)
    monkeypatch.setattr(TorchExport, "weights", lambda _self, _file: None)  # no program was written
    differs(lambda: export(source, "torch_export", tmp_path / "program", Options()), "rms_norm_eps")
    assert not (tmp_path / "program").exists()


@pytest.fixture(params=["awq", "gptq"])
def packed(request: pytest.FixtureRequest, folder: Path) -> Path:
    """The folder with its layers in 4 bits, as an independent writer packs them."""
    pack_layers(folder, request.param, GROUP)
    section: dict[str, Any] = {"quant_method": request.param, "bits": 4, "group_size": GROUP}
    section |= {"version": "gemm", "zero_point": True} if request.param == "awq" else {}
    change_json(folder / "config.json", lambda it: it.update(quantization_config=section))
    return folder


def change_tensor(folder: Path, name: str, change: Callable[[torch.Tensor], object]) -> None:
    file = folder / "model.safetensors"
    tensors = load_file(file)
    change(tensors[name])
    save_file(tensors, file, metadata={"format": "pt"})


def test_packed_layers_pass(source: Source, packed: Path) -> None:
    figures = compare_packed(packed, source.model, MOST_ERROR)
    assert figures["compared"] == len(source.model.state_dict()) - 1  # the head is the embedding
    assert 0.01 < figures["largest_error"] < 0.2


def flip(words: torch.Tensor) -> None:
    words[0, 0] = ~words[0, 0]


def double(values: torch.Tensor) -> None:
    values[0, 3] *= 2


@pytest.mark.parametrize(
    ("tensor", "change"),
    [
        (f"{QUERY}.qweight", flip),  # one word, of eight weights
        (f"{QUERY}.qzeros", flip),
        (f"{QUERY}.scales", double),  # of one group
        ("model.norm.weight", lambda it: it[:1].mul_(1.01)),
        ("model.embed_tokens.weight", lambda it: it[77].zero_()),
    ],
)
def test_a_wrong_part_of_a_packed_model_is_named(
    source: Source, packed: Path, tensor: str, change: Callable[[torch.Tensor], object]
) -> None:
    change_tensor(packed, tensor, change)
    differs(lambda: compare_packed(packed, source.model, MOST_ERROR), tensor.rpartition(".")[0])


@pytest.mark.parametrize("name", ["model.norm.weight", "model.embed_tokens.weight"])
def test_a_tensor_that_was_not_written_is_named(source: Source, packed: Path, name: str) -> None:
    file = packed / "model.safetensors"
    tensors = load_file(file)
    del tensors[name]
    save_file(tensors, file, metadata={"format": "pt"})
    differs(lambda: compare_packed(packed, source.model, MOST_ERROR), name, "is missing")


def weights_of(model: Any) -> list[StoredWeight]:
    return [StoredWeight(value.detach().clone()) for value in model.parameters()]


def in_8_bits(values: torch.Tensor) -> StoredWeight:
    """A matrix in the nearest of 256 levels of each of its last dimension."""
    low, high = values.amin(0), values.amax(0)
    scale = ((high - low) / 255).clamp(min=1e-9)  # the row of the padding token is 0
    return StoredWeight(((values - low) / scale).round() * scale + low, levels=255)


def test_weights_are_found_as_they_are_transposed_with_1_added_and_in_8_bits(source: Source) -> None:
    weights = weights_of(source.model)
    assert compare_weights(iter(weights), source.model) == {"compared": len(weights)}
    others = [
        StoredWeight(one.values + 1) if one.values.ndim == 1 else in_8_bits(one.values.T) for one in weights
    ]
    assert compare_weights(others, source.model) == {"compared": len(weights)}
    folded = [one for one in weights if one.values.ndim == 2]
    assert "3 parameters" in compare_weights(folded, source.model)["not_compared"]


@pytest.mark.parametrize("bits", [8, 32])
@pytest.mark.parametrize("name", ["model.embed_tokens.weight", f"{QUERY}.weight"])
def test_one_wrong_value_of_a_programs_weight_is_named(source: Source, name: str, bits: int) -> None:
    parameters = dict(source.model.named_parameters())
    weights = {key: StoredWeight(value.detach().clone()) for key, value in parameters.items()}
    if bits == 8:
        weights = {
            key: in_8_bits(one.values) if one.values.ndim == 2 else one for key, one in weights.items()
        }
    weights[name].values[5, 7] += 0.01
    differs(lambda: compare_weights(weights.values(), source.model), name)


@pytest.mark.parametrize("bits", [8, 32])
@pytest.mark.parametrize("name", ["model.embed_tokens.weight", f"{QUERY}.weight"])
@pytest.mark.parametrize(
    "change",
    [
        torch.Tensor.zero_,
        torch.Tensor.neg_,
        torch.Tensor.normal_,
        lambda it: it[9].fill_(math.nan),
        lambda it: it[9, 3].fill_(math.inf),
    ],
    ids=["zeroed", "negated", "another model's", "nan", "inf"],
)
def test_a_programs_weight_of_wholly_other_values_is_named(
    source: Source, name: str, bits: int, change: Callable[[torch.Tensor], object]
) -> None:
    parameters = dict(source.model.named_parameters())
    weights = {key: StoredWeight(value.detach().clone()) for key, value in parameters.items()}
    if bits == 8:
        weights = {
            key: in_8_bits(one.values) if one.values.ndim == 2 else one for key, one in weights.items()
        }
    change(weights[name].values)
    differs(lambda: compare_weights(weights.values(), source.model), name)


def test_two_weights_of_one_shape_exchanged_under_their_names_are_named(source: Source) -> None:
    one, other = "model.layers.0.mlp.gate_proj.weight", "model.layers.0.mlp.up_proj.weight"
    values = {name: value.detach() for name, value in source.model.named_parameters()}
    values[one], values[other] = values[other], values[one]
    named = [StoredWeight(value, name) for name, value in values.items()]
    differs(lambda: compare_weights(named, source.model), one)


def test_one_weight_is_not_taken_for_two_parameters(source: Source) -> None:
    one, other = "model.layers.0.mlp.gate_proj.weight", "model.layers.0.mlp.up_proj.weight"
    values = {name: value.detach() for name, value in source.model.named_parameters()}
    values[other] = values[one]
    differs(lambda: compare_weights(map(StoredWeight, values.values()), source.model), other)


def test_a_coarse_scale_of_the_file_excuses_no_error(source: Source) -> None:
    weights = [
        StoredWeight((one.values / 1000).round() * 1000, levels=255) if one.values.ndim == 2 else one
        for one in weights_of(source.model)
    ]
    differs(lambda: compare_weights(weights, source.model), "model.embed_tokens.weight")


def test_a_tied_head_of_other_values_is_named(source: Source) -> None:
    weights = weights_of(source.model)
    head = source.model.lm_head.weight.detach().T.clone()
    assert compare_weights([*weights, StoredWeight(head)], source.model) == {"compared": len(weights)}
    head[3, 77] += 1
    differs(lambda: compare_weights([*weights, StoredWeight(head)], source.model), "lm_head.weight")


def test_a_trace_with_one_other_embedding_is_refused(source: Source, tmp_path: Path) -> None:
    export(source, "torchscript", tmp_path / "out", Options(), check=False)
    file, chosen = tmp_path / "out" / "model.pt", TorchScript()
    count = len(list(source.model.parameters()))
    assert compare_weights(chosen.weights(file), source.model) == {"compared": count}
    traced: Any = torch.jit.load(file)  # type: ignore[no-untyped-call]
    with torch.no_grad():
        traced.model.embed_tokens.weight[77] = 0  # of a token that no text may have
    torch.jit.save(traced, file)
    differs(lambda: compare_weights(chosen.weights(file), source.model), "model.embed_tokens.weight")


def test_weights_of_an_onnx_file_are_read_in_32_and_in_8_bits(tmp_path: Path) -> None:
    onnx = pytest.importorskip("onnx", reason="needs the extra export")
    from onnx.numpy_helper import from_array

    plain, scale = np.arange(6, dtype=np.float32).reshape(3, 2), np.array([0.5, 0.25], np.float32)
    levels = np.array([[0, 255], [7, 8], [128, 3]], np.uint8)
    parts: dict[str, Any] = {
        "a": plain,
        "b_quantized": levels,
        "b_scale": scale,
        "b_zero_point": np.array([7, 8], np.uint8),
    }
    graph = onnx.helper.make_graph(
        [], "g", [], [], [from_array(array, name) for name, array in parts.items()]
    )
    onnx.save(onnx.helper.make_model(graph), tmp_path / "model.onnx")
    weights = {tuple(one.values.shape): one for one in Onnx().weights(tmp_path / "model.onnx")}
    read = [one for one in Onnx().weights(tmp_path / "model.onnx") if one.values.ndim == 2]
    assert weights.keys() == {(3, 2)}  # a scale is no weight
    assert torch.equal(read[0].values, torch.tensor(plain))
    assert torch.equal(
        read[1].values, (torch.tensor(levels).float() - torch.tensor([7, 8])) * torch.tensor(scale)
    )
    assert [one.levels for one in read] == [0, 255]
