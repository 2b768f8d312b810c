"""RoPE scaling in GGUF: what is refused, what is noted, and files judged by gym-fed's importer for each kind."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken
from transformers import LlamaConfig

from gym_fed.base.models import load_model
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.export.formats import gguf as format_module
from gym_fed.export.formats.base import Options
from gym_fed.export.gguf.rope import different_rotations, rope_keys, rope_notes, rope_refusal
from gym_fed.export.run import export
from gym_fed.export.source import open_source
from tests.support.siblings import make_sibling

THETA = {"rope_theta": 10000.0}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024, **THETA}
ROPES: dict[str, dict[str, Any]] = {
    "linear": {"rope_type": "linear", "factor": 4.0, **THETA},
    "dynamic": {"rope_type": "dynamic", "factor": 4.0, **THETA},
    "yarn": YARN,
    "yarn with a factor": {**YARN, "attention_factor": 1.3},
}


def _config(**changes: Any) -> Any:
    return LlamaConfig(
        hidden_size=32, num_attention_heads=4, max_position_embeddings=4096, vocab_size=64, **changes
    )


@pytest.mark.parametrize("kind", ROPES)
def test_the_same_scaling_has_the_same_rotations_and_others_differ(kind: str) -> None:
    config = _config(rope_parameters=ROPES[kind])
    assert different_rotations(_config(rope_parameters=ROPES[kind]), config) == ""
    for other in ({"rope_type": "default", "rope_theta": 500.0}, {**YARN, "factor": 2.0}):
        assert "the source's RoPE scaling" in different_rotations(_config(rope_parameters=other), config)


def test_another_factor_of_attention_differs_though_the_frequencies_are_the_same() -> None:
    config = _config(rope_parameters=ROPES["yarn with a factor"])
    assert "rotation factor is 1.1386, not 1.3" in different_rotations(_config(rope_parameters=YARN), config)
    assert rope_keys(config) == {"rope.scaling.attn_factor": pytest.approx(1.3 / 1.138629, rel=1e-5)}
    assert rope_keys(_config(rope_parameters=YARN)) == {"rope.scaling.attn_factor": pytest.approx(1.0)}


def test_yarn_that_llama_cpp_computes_otherwise_is_refused_by_its_settings() -> None:
    assert rope_refusal(_config(rope_parameters=YARN)) == ""
    why = rope_refusal(_config(rope_parameters={**YARN, "beta_fast": 16.0}))
    assert "beta_fast 16, beta_slow 1" in why


def test_what_is_lost_in_long_texts_is_noted_with_the_number_of_tokens() -> None:
    assert rope_notes(_config()) == []
    assert "4,096 tokens" in rope_notes(_config(rope_parameters=ROPES["dynamic"]))[0]
    windowed = _config()
    windowed.model_type, windowed.sliding_window = "mistral", 1024
    assert "1,024 tokens" in rope_notes(windowed)[0]


@pytest.mark.slow  # the converter's process imports torch and transformers: 10 s on one core
@pytest.mark.parametrize("kind", ["llama3", *ROPES])
def test_a_file_of_each_kind_of_scaling_is_judged_without_llama_cpp(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(format_module, "_LLAMA_CPP", False)
    folder = make_sibling("llama3", tmp_path / "model")
    if kind in ROPES:
        config = json.loads((folder / "config.json").read_text())
        for key in ("rope_scaling", "rope_theta"):
            config.pop(key, None)
        (folder / "config.json").write_text(json.dumps({**config, "rope_parameters": ROPES[kind]}))
    record = export(open_source(str(folder)), "gguf", tmp_path / "m.gguf", Options(quantization="f32"))
    assert record["unchecked"] is False
    assert "gym-fed" in record["check"]["read_by"]
    assert record["check"]["read_back"]["max"] < 1e-5
    assert record["check"]["tensors"]["compared"] > 0
    assert bool(record.get("notes")) is (kind == "dynamic")


@pytest.mark.slow  # the converter's process imports torch and transformers: 10 s on one core
@pytest.mark.parametrize("kind", ["phi3", "phi4_mini", "mistral", "gemma3", "qwen3_moe", "mixtral", "qwen2"])
def test_families_that_transformers_misreads_are_judged_without_llama_cpp(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(format_module, "_LLAMA_CPP", False)
    source = open_source(str(make_sibling(kind, tmp_path / "model")))
    record = export(source, "gguf", tmp_path / "m.gguf", Options(quantization="f32"))
    assert record["unchecked"] is False
    assert record["check"]["read_back"]["max"] < 1e-5
    assert record["check"]["vocabulary"]["compared"] >= len(source.tokenizer)


@pytest.mark.slow  # the converter's process imports torch and transformers: 10 s on one core
@pytest.mark.parametrize("kind", ["llama3", "qwen3", "mistral"])
def test_added_tokens_are_written_as_they_are(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(format_module, "_LLAMA_CPP", False)
    loaded = load_model(str(make_sibling(kind, tmp_path / "base")))
    tokens = [AddedToken("§5A", normalized=False), AddedToken("Ünïcode tok", normalized=False)]
    loaded.tokenizer.add_tokens(tokens)
    loaded.model.resize_token_embeddings(len(loaded.tokenizer), mean_resizing=False)
    loaded.model.save_pretrained(tmp_path / "model")
    loaded.tokenizer.save_pretrained(tmp_path / "model")
    record = export(
        open_source(str(tmp_path / "model")), "gguf", tmp_path / "m.gguf", Options(quantization="f32")
    )
    assert record["check"]["vocabulary"]["added"] == len(loaded.tokenizer.added_tokens_decoder)
    assert record["check"]["read_back"]["same_token_ids"]


def test_a_model_that_nothing_here_reads_is_refused_before_anything_is_converted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(format_module, "_LLAMA_CPP", False)
    source = open_source(str(make_sibling("qwen3", tmp_path / "model")))
    source.model.config.model_type = "olmo2"
    with pytest.raises(GymError, match="neither gym-fed nor transformers reads olmo2") as raised:
        format_module.Gguf().require_reader(source)
    assert raised.value.code is ErrorCode.MISSING_DEPENDENCY
    assert "--skip-check" in str(raised.value.hint)
