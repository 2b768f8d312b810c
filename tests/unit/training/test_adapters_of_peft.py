"""Adapters as PEFT writes them: each computes here what it does in PEFT, merged or not, or is refused with a remedy."""

from __future__ import annotations

import json
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from gym_fed.base.modeling.adapters import merged
from gym_fed.base.models import load_model
from gym_fed.core.errors import ErrorCode, GymError
from tests.support.adapters import logits, run, sibling
from tests.support.peft_adapters import ADAPTERS, made, plain
from tests.support.quick import quick

DTYPES = (torch.bfloat16, torch.float16)
QUICKLY = (
    "ranks and scales by pattern",
    "dora",
    "bias",
    "head saved",
    "embeddings",
    "embeddings and head tied",
    "single tokens",
    "parameters",
)
"""Adapters that the quick suite tries here; tests/contract exports every one."""


@pytest.fixture(scope="module", params=[False, True], ids=["own-head", "tied-head"])
def base(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama, whose output head has weights of its own or shares the embeddings'."""
    return sibling("Llama", tmp_path_factory.mktemp("peft") / "base", tie_word_embeddings=request.param)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama with an output head of its own."""
    return sibling("Llama", tmp_path_factory.mktemp("peft") / "base")


@pytest.mark.few(8, "the contract of PEFT adapters has every kind")
@pytest.mark.parametrize("name", quick(ADAPTERS, *QUICKLY))
def test_an_adapter_of_peft_computes_the_same_here_and_merged_and_saved(
    base: Path, tmp_path: Path, name: str
) -> None:
    wanted = made(base, tmp_path / "theirs", **ADAPTERS[name])
    assert (wanted - logits(plain(base))).abs().max() > 1e-2
    torch.testing.assert_close(logits(tmp_path / "theirs"), wanted, rtol=0, atol=1e-5)
    whole = merged(load_model(str(tmp_path / "theirs")).model)
    torch.testing.assert_close(logits(whole), wanted, rtol=0, atol=1e-5)
    whole.save_pretrained(str(tmp_path / "whole"))
    torch.testing.assert_close(logits(plain(tmp_path / "whole")), wanted, rtol=0, atol=1e-5)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_half_precision_is_read_as_peft_reads_it(llama: Path, tmp_path: Path, dtype: torch.dtype) -> None:
    wanted = made(llama, tmp_path / "theirs", dtype)
    assert {value.dtype for value in load_file(tmp_path / "theirs/adapter_model.safetensors").values()} == {
        dtype
    }
    torch.testing.assert_close(logits(tmp_path / "theirs"), wanted, rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", ["ranks and scales by pattern", "regular expression", "embeddings"])
def test_training_begins_with_what_peft_has_saved(llama: Path, tmp_path: Path, name: str) -> None:
    wanted = made(llama, tmp_path / "theirs", **ADAPTERS[name])
    still = {"model": str(llama), "adapter": str(tmp_path / "theirs"), "learning_rate": 1e-12, "max_steps": 1}
    for new in (False, True):
        run(tmp_path / f"new{new}", new_adapter=new, **still)
        torch.testing.assert_close(logits(tmp_path / f"new{new}"), wanted, rtol=0, atol=1e-5)


def test_an_adapter_on_the_head_is_merged_but_not_trained(base: Path, tmp_path: Path) -> None:
    wanted = made(base, tmp_path / "theirs", **ADAPTERS["head"])
    named = {"model": str(base), "adapter": str(tmp_path / "theirs"), "max_steps": 1, "learning_rate": 1e-12}
    with pytest.raises(GymError, match="includes the output head") as caught:
        run(tmp_path / "on", **named)
    assert caught.value.code is ErrorCode.CONFIG_INVALID
    assert "new_adapter: true" in caught.value.hint
    with pytest.raises(GymError, match=r"lora\.target_modules includes the output head"):
        run(tmp_path / "on", model=str(base), lora={"target_modules": ["q_proj", "lm_head"]})
    assert not (tmp_path / "on").exists()
    run(tmp_path / "new", new_adapter=True, **named)
    torch.testing.assert_close(logits(tmp_path / "new"), wanted, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"alora_invocation_tokens": [7, 8]}, "alora_invocation_tokens enable it only at some tokens"),
        ({"layer_replication": [[0, 1], [0, 1]]}, "layer_replication lets several layers share"),
        ({"lora_bias": True}, "lora_bias adds to layers that have no bias"),
    ],
)
def test_what_no_weights_can_hold_is_not_merged(
    llama: Path, tmp_path: Path, settings: dict[str, Any], why: str
) -> None:
    wanted = made(llama, tmp_path / "theirs", **settings)
    torch.testing.assert_close(logits(tmp_path / "theirs"), wanted, rtol=0, atol=1e-5)
    with pytest.raises(GymError, match=why) as caught:
        run(tmp_path / "new", model=str(llama), adapter=str(tmp_path / "theirs"), new_adapter=True)
    assert "train it without new_adapter" in caught.value.hint
    assert not (tmp_path / "new").exists()
    with pytest.raises(GymError, match=why):
        merged(load_model(str(tmp_path / "theirs")).model)


def test_pickled_weights_are_refused_with_the_command_that_converts_them(llama: Path, tmp_path: Path) -> None:
    folder = tmp_path / "of someone"
    wanted = made(llama, folder)
    safe = folder / "adapter_model.safetensors"
    torch.save(load_file(safe), folder / "adapter_model.bin")
    safe.unlink()
    with pytest.raises(GymError, match=r"its weights are pickled \(adapter_model\.bin\)") as caught:
        load_model(str(folder))
    assert not safe.exists()
    command = shlex.split(str(caught.value.hint).partition("with: ")[2])
    assert command[0] == "python"
    subprocess.run([sys.executable, *command[1:]], check=True)
    torch.testing.assert_close(logits(folder), wanted, rtol=0, atol=1e-5)


def test_an_adapter_of_other_shapes_or_of_a_base_that_is_not_here_is_refused(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "cache"))
    wide = sibling("Llama", tmp_path / "wide", hidden_size=32)
    made(llama, tmp_path / "theirs")
    file = tmp_path / "theirs/adapter_config.json"
    values = json.loads(file.read_text())
    file.write_text(json.dumps({**values, "base_model_name_or_path": str(wide)}))
    with pytest.raises(GymError, match="size mismatch") as caught:
        load_model(str(tmp_path / "theirs"))
    assert caught.value.code is ErrorCode.MODEL_INVALID
    file.write_text(json.dumps({**values, "base_model_name_or_path": "someone/a-model"}))
    with pytest.raises(GymError, match="no model called 'someone/a-model' on this machine") as caught:
        load_model(str(tmp_path / "theirs"))
    assert "gym models pull someone/a-model" in caught.value.hint
    theirs = tmp_path / "theirs/adapter_model.safetensors"
    save_file({"base_model.model.other.lora_A.weight": torch.zeros(4, 16)}, theirs, {"format": "pt"})
    shutil.copytree(llama, tmp_path / "a-model")
    file.write_text(json.dumps({**values, "base_model_name_or_path": str(tmp_path / "a-model")}))
    with pytest.raises(GymError, match="does not match this LlamaForCausalLM"):
        load_model(str(tmp_path / "theirs"))
