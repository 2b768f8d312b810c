"""GGUF LoRA adapters: llama.cpp's names and row order, reading back as factors, and refusals."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from gym_fed.base.modeling.adapters import merged
from gym_fed.base.models import load_model
from gym_fed.core.errors import GymError
from gym_fed.export.choice import format_by_suffix, resolve_format
from gym_fed.export.formats.base import Options
from gym_fed.export.readers.gguf import load
from gym_fed.export.readers.transformers import loaded
from gym_fed.export.run import export
from gym_fed.export.source import Source, open_source
from tests.support.adapters import logits, run, sibling

gguf = pytest.importorskip("gguf", reason="gguf comes with the extra export")


@pytest.fixture(scope="module", params=["Llama", "Qwen3"])
def tuned(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A base of two heads of four pairs, and a LoRA run on it."""
    folder = tmp_path_factory.mktemp(request.param)
    sibling(request.param, folder / "base", hidden_size=32, num_attention_heads=4, num_key_value_heads=2)
    run(folder / "run", model=str(folder / "base"))
    return folder


def read_back(file: Path, source: Source) -> Any:
    parts = {"by": "gguf", "file": str(file), "model": source.base, "chat_template": "{{ messages }}"}
    reading: Any = load(parts)
    assert reading.ids("hi") != []
    return reading._model


def test_the_factors_that_were_written_are_read_again(tuned: Path, tmp_path: Path) -> None:
    source = open_source(str(tuned / "run"))
    record = export(source, "gguf_adapter", tmp_path / "one.gguf", Options(), check=False)
    assert "notes" not in record
    found = read_back(tmp_path / "one.gguf", source)
    torch.testing.assert_close(logits(found), logits(source.model), rtol=0, atol=1e-6)
    assert (logits(found) - logits(tuned / "base")).abs().max() > 1e-3


def test_a_file_has_llama_cpps_names_shapes_and_alpha(tuned: Path, tmp_path: Path) -> None:
    source = open_source(str(tuned / "run"))
    export(source, "gguf_adapter", tmp_path / "one.gguf", Options(), check=False)
    read = gguf.GGUFReader(tmp_path / "one.gguf")
    kept = {key: read.get_field(key).contents() for key in ("general.type", "adapter.type")}
    assert kept == {"general.type": "adapter", "adapter.type": "lora"}
    assert read.get_field("general.architecture").contents() == source.model.config.model_type
    settings = source.model.peft_config["default"]
    assert read.get_field("adapter.lora.alpha").contents() == settings.lora_alpha
    shapes = {tensor.name: tuple(map(int, tensor.shape)) for tensor in read.tensors}
    state = source.model.get_base_model().state_dict()
    assert shapes["blk.0.ffn_up.weight.lora_a"] == (32, settings.r)
    assert shapes["blk.0.ffn_up.weight.lora_b"] == (settings.r, 36)
    assert len(shapes) == sum(".lora_A." in name or ".lora_B." in name for name in state)


def test_rows_of_b_are_in_the_order_that_llama_cpps_converter_gives_the_weight(tmp_path: Path) -> None:
    """A merged weight, converted, is the converted base plus the file's product; of queries and keys of two sizes."""
    sibling("Llama", tmp_path / "base", hidden_size=32, num_attention_heads=4, num_key_value_heads=2)
    run(tmp_path / "run", model=str(tmp_path / "base"))
    source = open_source(str(tmp_path / "run"))
    export(source, "gguf_adapter", tmp_path / "one.gguf", Options(), check=False)
    read = gguf.GGUFReader(tmp_path / "one.gguf")
    tensors = {tensor.name: torch.from_numpy(tensor.data.copy()) for tensor in read.tensors}
    settings = source.model.peft_config["default"]
    base, _ = loaded({"model": str(tmp_path / "base")})
    whole = merged(source.model)
    for end, theirs, heads in (("q_proj", "attn_q", 4), ("k_proj", "attn_k", 2)):
        name = f"model.layers.0.self_attn.{end}.weight"
        change = whole.get_parameter(name) - base.get_parameter(name)
        # as the converter for Llama reorders weights: row i of the first half of a head comes before its partner
        rows = change.shape[0] // heads
        order = [
            h * rows + i + half for h in range(heads) for i in range(rows // 2) for half in (0, rows // 2)
        ]
        a, b = (tensors[f"blk.0.{theirs}.weight.lora_{which}"] for which in "ab")
        product = settings.lora_alpha / settings.r * b @ a
        torch.testing.assert_close(product, change[order], rtol=0, atol=1e-6)
        assert change.abs().max() > 1e-4


def test_what_an_adapters_file_cannot_hold_is_refused_or_noted(tmp_path: Path) -> None:
    base = sibling("Qwen3Moe", tmp_path / "moe")
    run(tmp_path / "on-moe", model=str(base), max_steps=1)
    out = tmp_path / "out.gguf"
    with pytest.raises(GymError, match="is a qwen3_moe model, but only llama, qwen3 are supported"):
        export(open_source(str(tmp_path / "on-moe")), "gguf_adapter", out, Options(), check=False)
    plain = sibling("Llama", tmp_path / "base")
    with pytest.raises(GymError, match="has no adapter and no delta"):
        export(open_source(str(plain)), "gguf_adapter", out, Options(), check=False)
    run(tmp_path / "run", model=str(plain), max_steps=1)
    source = open_source(str(tmp_path / "run"))
    with pytest.raises(GymError, match="is written in float32"):
        export(source, "gguf_adapter", out, Options(dtype="float16"), check=False)
    with pytest.raises(GymError, match=r"--rank: .* has its own adapter"):
        export(source, "gguf_adapter", out, Options(rank=3), check=False)
    run(tmp_path / "second", model=str(plain), adapter=str(tmp_path / "run"), new_adapter=True, max_steps=1)
    with pytest.raises(GymError, match="was trained on other adapters"):
        export(open_source(str(tmp_path / "second")), "gguf_adapter", out, Options(), check=False)
    assert not out.exists()
    source.tokenizer.chat_template = "{{ messages[0]['content'] }}!"
    record = export(source, "gguf_adapter", out, Options(), check=False)
    assert any("--chat-template-file" in note for note in record["notes"])


def test_a_name_that_ends_in_gguf_may_be_an_adapter_and_means_a_model_without_format() -> None:
    assert resolve_format("gguf_adapter", Path("ada.gguf"), Options())[0].name == "gguf_adapter"
    assert format_by_suffix(Path("ada.gguf")) == "gguf"


def test_an_adapter_on_a_head_that_shares_the_embeddings_is_refused(tmp_path: Path) -> None:
    from peft import LoraConfig, get_peft_model

    base = sibling("Llama", tmp_path / "base", tie_word_embeddings=True)
    settings = LoraConfig(r=2, target_modules=["lm_head"], task_type="CAUSAL_LM", ensure_weight_tying=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PEFT's advice about tied words
        get_peft_model(load_model(str(base)).model, settings).save_pretrained(tmp_path / "run")
    source = open_source(str(base), [str(tmp_path / "run")])
    with pytest.raises(GymError, match=r"has no separate weight lm_head\.weight"):
        export(source, "gguf_adapter", tmp_path / "out", Options(), check=False)


@pytest.mark.slow  # the base is converted and read by llama.cpp: half a minute
@pytest.mark.shared
def test_llama_cpp_computes_the_base_with_the_adapter(shared_folder: Path, tmp_path: Path) -> None:
    pytest.importorskip("llama_cpp", reason="llama-cpp-python is built from source, by who wants it")
    from peft import LoraConfig, get_peft_model

    base = str(shared_folder / "models/stories260K")
    settings = LoraConfig(
        r=4, target_modules="all-linear", init_lora_weights=False, task_type="CAUSAL_LM", lora_alpha=8
    )
    torch.manual_seed(0)
    get_peft_model(load_model(base).model, settings).save_pretrained(tmp_path / "run")
    source = open_source(base, [str(tmp_path / "run")])
    assert (logits(source.model) - logits(base)).abs().max() > 0.1
    record = export(source, "gguf_adapter", tmp_path / "out.gguf", Options())
    assert "llama-cpp-python" in record["check"]["read_by"]
    assert record["check"]["read_back"]["top1"] == 1.0
