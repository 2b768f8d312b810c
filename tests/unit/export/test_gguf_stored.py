"""Comparison of a GGUF file with its source: a correct file passes, every planted change is refused by name."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from gym_fed.base.imports.gguf.header import read_header
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.export.gguf.k_quants import k_blocks
from gym_fed.export.gguf.stored import ROUNDINGS, compare_stored
from gym_fed.export.process import no_report
from tests.support.gguf_files import write_gguf
from tests.support.siblings import make_sibling

KINDS = ("f32", "f16", "q8_0", "q4_0")
DOWN = "blk.1.ffn_down.weight"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small Llama, whose rotary positions are stretched."""
    return make_sibling("llama3", tmp_path_factory.mktemp("llama") / "model")


@pytest.fixture(scope="module")
def model(folder: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


@pytest.mark.parametrize("kind", KINDS)
def test_a_file_of_the_source_passes_and_says_what_was_compared(
    kind: str, folder: Path, model: Any, tmp_path: Path
) -> None:
    file = write_gguf(folder, tmp_path / "model.gguf", kind=kind)
    found = compare_stored(file, model, no_report)
    assert found["compared"] == len(read_header(file).tensors) - 1, "rope_freqs is no parameter"
    assert found["largest_error"].keys() == {"F32", kind.upper()}
    assert found["largest_error"]["F32"] == 0
    assert found["largest_error"][kind.upper()] <= ROUNDINGS[kind.upper()].most
    assert bool(found["largest_error"][kind.upper()]) is kind.startswith("q"), "bfloat16 fits"


@pytest.mark.parametrize("kind", KINDS)
def test_a_matrix_a_tenth_too_large_is_refused_by_its_name(
    kind: str, folder: Path, model: Any, tmp_path: Path
) -> None:
    smaller = copy.deepcopy(model)
    smaller.model.layers[1].mlp.down_proj.weight.data /= 1.1
    file = write_gguf(folder, tmp_path / "model.gguf", kind=kind)
    _require_refused(file, smaller, DOWN)


@pytest.mark.parametrize("kind", KINDS)
def test_one_flipped_byte_is_refused_by_its_tensors_name(
    kind: str, folder: Path, model: Any, tmp_path: Path
) -> None:
    file = write_gguf(folder, tmp_path / "model.gguf", kind=kind)
    content = bytearray(file.read_bytes())
    content[read_header(file).tensors[DOWN].start + 1] ^= 0xFF
    file.write_bytes(content)
    _require_refused(file, model, DOWN)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("llama.attention.layer_norm_rms_epsilon", 1e-6),
        ("llama.rope.freq_base", 90000.0),
        ("llama.rope.dimension_count", 2),
        ("llama.attention.head_count", 1),
        ("llama.attention.head_count_kv", 7),
        ("llama.context_length", 77),
    ],
)
def test_a_setting_of_the_forward_that_differs_is_refused_by_its_key(
    key: str, value: Any, folder: Path, model: Any, tmp_path: Path
) -> None:
    _require_refused(write_gguf(folder, tmp_path / "model.gguf", keys={key: value}), model, key)


def test_rotary_positions_stretched_otherwise_are_refused_by_the_tensors_name(
    folder: Path, model: Any, tmp_path: Path
) -> None:
    other = copy.copy(model)
    other.config = copy.deepcopy(model.config)
    other.config.rope_parameters["factor"] *= 2
    _require_refused(write_gguf(folder, tmp_path / "model.gguf"), other, "rope_freqs.weight")


def test_a_tensor_that_is_missing_or_one_more_is_refused_by_its_name(
    folder: Path, model: Any, tmp_path: Path
) -> None:
    file = tmp_path / "model.gguf"
    _require_refused(write_gguf(folder, file, without=(DOWN,)), model, "layers.1.mlp.down_proj.weight")
    _require_refused(write_gguf(folder, file, more=("blk.9.ffn_up.weight",)), model, "blk.9.ffn_up.weight")


def test_an_architecture_without_a_mapping_is_recorded_as_not_compared(model: Any, tmp_path: Path) -> None:
    other = copy.copy(model)
    other.config = copy.deepcopy(model.config)
    other.config.model_type = "olmo2"
    assert "olmo2" in compare_stored(tmp_path / "none.gguf", other, no_report)["not_compared"]


@pytest.mark.shared
@pytest.mark.parametrize("kind", ["Q4_K", "Q5_K", "Q6_K"])
@pytest.mark.parametrize("factor", [1.0, 1.1])
def test_blocks_of_k_types_keep_their_bound_unless_the_matrix_is_another(
    kind: str, factor: float, shared_folder: Path
) -> None:
    from gguf import GGMLQuantizationType
    from gguf.quants import dequantize
    from safetensors.torch import load_file

    from gym_fed.export.gguf.stored import largest_error

    weights = load_file(shared_folder / "models/stories260K/model.safetensors")
    wanted = weights["model.embed_tokens.weight"].float().reshape(-1, 256)
    blocks = k_blocks(kind, wanted.numpy() * np.float32(factor))
    found = torch.from_numpy(dequantize(blocks, GGMLQuantizationType[kind]))
    if factor == 1:
        assert 0 < largest_error("it", kind, wanted, found) <= ROUNDINGS[kind].most
        return
    with pytest.raises(GymError, match=r"it .* is"):
        largest_error("it", kind, wanted, found)


def _require_refused(file: Path, model: Any, name: str) -> None:
    with pytest.raises(GymError, match=name) as raised:
        compare_stored(file, model, no_report)
    assert raised.value.code is ErrorCode.EXPORT_DIFFERS
