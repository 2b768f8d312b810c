"""`gym delta`: encode, show and apply on a small real model, and what they refuse."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import Result
from typer.testing import CliRunner

from gym_fed.base.models import load_model
from gym_fed.cli.main import app
from gym_fed.config.delta import CodecPolicy
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.delta.base import BaseSpec, model_tensors
from gym_fed.delta.encode import encode_delta
from gym_fed.delta.factors import lora_factors
from gym_fed.delta.file import DeltaFile

Gym = Callable[..., Result]


@pytest.fixture
def gym() -> Gym:
    def call(*words: object) -> Result:
        return CliRunner().invoke(app, ["delta", *(str(word) for word in words)])

    return call


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A base, a full fine-tune of it, and a LoRA run on it, as folders."""
    from peft import LoraConfig, get_peft_model
    from transformers import LlamaConfig, LlamaForCausalLM

    path = tmp_path_factory.mktemp("models")
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=64,
            hidden_size=32,
            intermediate_size=172,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            tie_word_embeddings=True,
        )
    )
    for name in ("base", "tuned"):
        save_tokenizer(path / name)
    model.save_pretrained(path / "base")
    with torch.no_grad():
        for tensor in model.parameters():
            tensor.add_(1e-3 * torch.randn_like(tensor))
    model.save_pretrained(path / "tuned")
    adapted = get_peft_model(
        load_model(str(path / "base")).model, LoraConfig(r=2, target_modules=["down_proj"])
    )
    adapted.peft_config["default"].base_model_name_or_path = str(path / "base")
    with torch.no_grad():
        for name, tensor in adapted.named_parameters():
            if "lora_B" in name:
                tensor.add_(1e-2 * torch.randn_like(tensor))
    adapted.save_pretrained(str(path / "lora"))
    return path


def save_tokenizer(folder: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({"<unk>": 0, "</s>": 1, "to": 2, "be": 3}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="<unk>", eos_token="</s>").save_pretrained(
        folder
    )


def refused(result: Result) -> GymError:
    assert isinstance(result.exception, GymError), result.output
    return result.exception


def test_a_diff_applied_to_its_base_is_near_the_tuned_model(folder: Path, tmp_path: Path, gym: Gym) -> None:
    delta, out = tmp_path / "d.gymdelta", tmp_path / "model"
    words = ("--codec", "bitdelta", "--group-size", 64)
    assert gym("encode", folder / "base", folder / "tuned", "-o", delta, *words).exit_code == 0
    assert gym("apply", folder / "base", delta, "-o", out).exit_code == 0
    base, tuned, made = (
        model_tensors(load_model(str(m)).model) for m in (folder / "base", folder / "tuned", out)
    )
    missed = sum(float((made[n] - tuned[n]).square().sum()) for n in base) ** 0.5
    moved = sum(float((base[n] - tuned[n]).square().sum()) for n in base) ** 0.5
    assert missed < 0.65 * moved
    assert load_model(str(out)).tokenizer("to be").input_ids


def test_a_lora_run_keeps_its_own_factors(folder: Path, tmp_path: Path, gym: Gym) -> None:
    delta = tmp_path / "d.gymdelta"
    assert gym("encode", folder / "base", folder / "lora", "-o", delta, "--codec", "lora").exit_code == 0
    adapted = load_model(str(folder / "lora")).model
    factors = lora_factors(adapted)
    merged = model_tensors(adapted.merge_and_unload())
    base = model_tensors(load_model(str(folder / "base")).model)
    with DeltaFile.open(delta) as opened:
        assert set(opened.names) == set(factors)
        for name in opened.names:
            wanted = merged[name] - base[name]
            assert (opened.decode(name) - wanted).norm() < wanted.norm() / 128


def test_show_prints_every_tensor_and_the_totals(folder: Path, tmp_path: Path, gym: Gym) -> None:
    delta = tmp_path / "d.gymdelta"
    gym("encode", folder / "base", folder / "tuned", "-o", delta, "--codec", "bitdelta")
    shown = gym("show", delta).output
    summary: dict[str, Any] = json.loads(gym("show", delta, "--json").output)
    spec = BaseSpec.of(load_model(str(folder / "base")).model, "base")
    assert {tensor["name"] for tensor in summary["tensors"]} == set(spec.shapes)
    assert all(name in shown for name in spec.shapes)
    assert summary["base_digest"] == spec.digest
    assert spec.digest in shown
    assert summary["size_bytes"] == delta.stat().st_size
    assert summary["header_bytes"] + sum(t["bytes"] for t in summary["tensors"]) == summary["size_bytes"]
    assert f"{summary['bits_per_weight']:.3f} bits per weight" in shown
    for tensor in summary["tensors"]:
        assert tensor["bits_per_weight"] == 8 * tensor["bytes"] / math.prod(tensor["shape"])


def test_a_wrong_base_is_refused(folder: Path, tmp_path: Path, gym: Gym) -> None:
    delta = tmp_path / "d.gymdelta"
    gym("encode", folder / "base", folder / "tuned", "-o", delta)
    error = refused(gym("apply", folder / "tuned", delta, "-o", tmp_path / "model"))
    assert error.code is ErrorCode.BASE_MISMATCH
    assert not (tmp_path / "model").exists()


def test_nothing_is_overwritten(folder: Path, tmp_path: Path, gym: Gym) -> None:
    delta = tmp_path / "d.gymdelta"
    gym("encode", folder / "base", folder / "tuned", "-o", delta)
    before = delta.read_bytes()
    again = ("encode", folder / "base", folder / "tuned", "-o", delta, "--codec", "dense")
    assert refused(gym(*again)).code is ErrorCode.FILE_EXISTS
    assert delta.read_bytes() == before
    (tmp_path / "model").mkdir()
    assert (
        refused(gym("apply", folder / "base", delta, "-o", tmp_path / "model")).code is ErrorCode.FILE_EXISTS
    )
    assert gym(*again, "--overwrite").exit_code == 0
    assert delta.read_bytes() != before


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--codec", "zip"], "unknown codec 'zip' (known: compact, auto,"),
        (["--codec", "dense", "--group-size", "64"], "apply only to codecs with scales"),
        (["--set", "norms=int8"], "renamed to --set small_tensors"),
        (["--rank", "4"], "lora_rank applies only to codecs of factors"),
        (
            ["--small", "int8"],
            "codec 'compact' chooses codecs itself: remove small_tensors, or choose a codec",
        ),
        (
            ["--codec", "int8", "--set", "max_error=0.1"],
            "max_error applies only to codec 'compact', not to 'int8'",
        ),
    ],
)
def test_options_that_contradict_each_other_are_refused(
    words: list[str], message: str, folder: Path, tmp_path: Path, gym: Gym
) -> None:
    error = refused(gym("encode", folder / "base", folder / "tuned", "-o", tmp_path / "d.gymdelta", *words))
    assert error.code is ErrorCode.CONFIG_INVALID
    assert message in error.message
    assert not (tmp_path / "d.gymdelta").exists()


def test_texts_of_a_file_neither_drive_the_terminal_nor_add_lines(gym: Gym, tmp_path: Path) -> None:
    hostile = "\x1b]0;x\x07\nsha256  forged\u202e"
    base, path = {"w": torch.zeros(8, 8)}, tmp_path / "hostile.gymdelta"
    spec = BaseSpec(hostile, f"sha256:{'0' * 64}", {"w": (8, 8)})
    encode_delta(
        {"w": torch.ones(8, 8)}, base, CodecPolicy(error_feedback=False), path, spec, extra={hostile: hostile}
    )
    shown = gym("show", path).output
    assert not {"\x1b", "\x07", "\u202e"} & set(shown)
    assert sum(line.startswith("sha256") for line in shown.splitlines()) == 1
