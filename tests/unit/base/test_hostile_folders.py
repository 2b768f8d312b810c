"""Folders of models and adapters from anybody: circles of bases, ranks that fill the memory, code that wants to run."""

from __future__ import annotations

import json
import os
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from gym_fed.base.downloads import ensure_model, missing_model
from gym_fed.base.modeling import patterns
from gym_fed.base.modeling.adapter_vocabulary import adapter_tokenizer
from gym_fed.base.modeling.adapters import read_adapter
from gym_fed.base.modeling.patterns import require_quick_patterns
from gym_fed.base.models import load_model, load_tokenizer, nano_path
from gym_fed.core.bounded import pool
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.evaluation.graders.reward_model import RewardModelConfig, RewardModelGrader


def adapter(folder: Path, base: Any, **changes: Any) -> Path:
    """A LoRA of rank 4 on one layer."""
    folder.mkdir()
    config = {"peft_type": "LORA", "base_model_name_or_path": base, "r": 4, "target_modules": ["q_proj"]}
    (folder / "adapter_config.json").write_text(json.dumps({**config, **changes}))
    name = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
    save_file({name: torch.zeros(4, 8)}, folder / "adapter_model.safetensors")
    return folder


@pytest.mark.parametrize("act", [missing_model, load_model, lambda name: ensure_model(name, consent=bool)])
def test_adapters_whose_bases_go_in_a_circle_are_refused(tmp_path: Path, act: Any) -> None:
    one = adapter(tmp_path / "one", str(tmp_path / "two"))
    adapter(tmp_path / "two", str(one))
    with pytest.raises(GymError, match="are nested without a model") as raised:
        act(str(one))
    assert raised.value.code is ErrorCode.MODEL_INVALID


@pytest.mark.parametrize(
    "changes",
    [{"r": 10**9}, {"rank_pattern": {"q_proj": 10**9}}, {"peft_type": "ADALORA", "init_r": 10**9}],
)
def test_a_rank_that_the_weights_do_not_have_is_refused_before_it_takes_memory(
    tmp_path: Path, changes: dict[str, Any]
) -> None:
    folder = adapter(tmp_path / "huge", "gym-nano", **changes)
    with pytest.raises(GymError, match=r"says rank 1e\+09, but its weights have"):
        read_adapter("huge", folder)


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"peft_type": "PROMPT_TUNING", "num_virtual_tokens": 10**12}, "creates tensors that are larger"),
        (
            {"peft_type": "VBLORA", "num_vectors": 10**12, "vector_length": 8},
            "creates tensors that are larger",
        ),
        ({"layer_replication": [[0, 2]] * 1000}, "layer_replication makes 2,000 layers, but at most 257"),
        ({"peft_type": "SHADOW", "shadow_model": "no/body"}, "shadow_model of SHADOW loads other files"),
        ({"peft_type": "XLORA", "adapters": {"0": "no/body"}}, "adapters of XLORA loads other files"),
        (
            {"peft_type": "MULTITASK_PROMPT_TUNING", "prompt_tuning_init_state_dict_path": "/dev/zero"},
            "prompt_tuning_init_state_dict_path of .* loads other files",
        ),
        ({"peft_type": ["a"]}, "does not match"),
        ({"lora_alpha": "x"}, "does not match"),
        ({"target_modules": 7}, "does not match"),
        ({"rank_pattern": [1, 2]}, "does not match"),
        ({"trainable_token_indices": [10**12]}, "does not match"),
    ],
)
def test_a_config_that_makes_peft_allocate_load_or_fail_is_refused(
    tmp_path: Path, changes: dict[str, Any], problem: str
) -> None:
    folder = adapter(tmp_path / "hostile", "gym-nano", **{"target_modules": None, **changes})
    if "lora_alpha" in changes:
        folder = adapter(tmp_path / "typed", "gym-nano", **changes)
    with pytest.raises(GymError, match=problem) as raised:
        load_model(str(folder))
    assert raised.value.code is ErrorCode.MODEL_INVALID


def test_a_rank_that_the_weights_have_is_read(tmp_path: Path) -> None:
    assert read_adapter("right", adapter(tmp_path / "right", "gym-nano")).base == "gym-nano"


@pytest.mark.parametrize("base", [None, "", ["gym-nano"], {"a": 1}, 7])
def test_a_reward_models_adapter_without_a_base_is_refused(tmp_path: Path, base: Any) -> None:
    folder = adapter(tmp_path / "scorer", base, task_type="SEQ_CLS")
    with pytest.raises(GymError, match="has no base model"):
        RewardModelGrader(RewardModelConfig(grader="reward_model", model=str(folder)))._classifier()


@pytest.mark.parametrize(
    "changes",
    [{"model_type": None}, {"model_type": "clip"}, {"model_type": {"a": 1}}, {"model_type": "evil"}],
)
def test_code_of_a_folder_is_not_run_and_nobody_is_asked_whether_to(
    tmp_path: Path, changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "evil"
    shutil.copytree(nano_path(), folder)
    config = json.loads((folder / "config.json").read_text())
    config |= {"auto_map": {"AutoConfig": "evil.C", "AutoModelForCausalLM": "evil.M"}, **changes}
    config = {key: value for key, value in config.items() if value is not None}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w').close()\n")

    def asked(question: str = "") -> str:
        raise AssertionError(f"asked: {question}")

    monkeypatch.setattr("builtins.input", asked)
    with pytest.raises(GymError) as raised:
        load_model(str(folder))
    assert raised.value.code is ErrorCode.MODEL_INVALID
    assert not (tmp_path / "ran").exists()
    assert "evil" not in sys.modules


SLOW = r"([a-z0-9_.]|[a-z0-9_.])+!"
"""Takes 2^n steps for a name of n letters."""


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("target_modules", f"(?i){SLOW}"),
        ("rank_pattern", {SLOW: 4}),
        ("modules_to_save", ["lm_head", SLOW]),
        *(
            pytest.param(key, value, marks=pytest.mark.slow)
            for key, value in [
                ("target_modules", SLOW),
                ("exclude_modules", SLOW),
                ("alpha_pattern", {SLOW: 4}),
                ("layers_pattern", SLOW),
            ]
        ),
    ],
)
def test_an_adapters_pattern_that_takes_for_ever_is_refused_by_key(
    tmp_path: Path, key: str, value: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool, "SECONDS", 1.0)
    names = ["model", "model.layers.0.post_attention_layernorm.weight"]
    folder = adapter(tmp_path / "slow", "gym-nano", **{key: value})
    with pytest.raises(GymError, match=rf"{key}: .*takes too long") as raised:
        require_quick_patterns(read_adapter("slow", folder).config, names, "slow")
    assert raised.value.code is ErrorCode.CONFIG_INVALID
    assert SLOW in raised.value.message


def test_patterns_of_a_folder_are_tried_before_it_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool, "SECONDS", 2.0)
    folder = adapter(tmp_path / "slow", "gym-nano", target_modules=SLOW)
    with pytest.raises(GymError, match=r"slow.adapter_config\.json\.target_modules: .*takes too long"):
        load_model(str(folder))


def test_a_pattern_that_is_too_long_and_too_many_patterns_are_refused() -> None:
    with pytest.raises(GymError, match="has 3,000 characters"):
        require_quick_patterns({"target_modules": "x" * 3000}, ["x"], "lora")
    many = {f"layer.{number}": 4 for number in range(patterns.MAX_PATTERNS + 1)}
    with pytest.raises(GymError, match="20001 patterns"):
        require_quick_patterns({"rank_pattern": many}, ["x"], "lora")


def test_patterns_that_people_write_are_taken() -> None:
    names = [f"model.layers.{n}.{part}" for n in range(80) for part in ("self_attn.q_proj", "mlp.down_proj")]
    wanted = {
        "target_modules": r"^(?!.*(lm_head|embed)).*\.(q_proj|v_proj|down_proj)$",
        "rank_pattern": {r"model\.layers\.[0-9]+\.self_attn.*": 8, "q_proj": 4},
        "layers_pattern": "layers",
        "exclude_modules": ["lm_head"],
        "modules_to_save": None,
    }
    require_quick_patterns(wanted, names, "lora")
    with pytest.raises(GymError, match=r"lora\.target_modules: '\(broken' is not a regular expression"):
        require_quick_patterns({"target_modules": "(broken"}, names, "lora")


@pytest.mark.parametrize("act", [load_model, load_tokenizer])
def test_a_panic_of_the_tokenizers_library_is_a_refusal_that_names_the_folder(
    tmp_path: Path, act: Any
) -> None:
    folder = Path(shutil.copytree(nano_path(), tmp_path / "hostile"))
    values = json.loads((folder / "tokenizer.json").read_text())
    values["normalizer"] = {"type": "Precompiled", "precompiled_charsmap": "AA=="}
    (folder / "tokenizer.json").write_text(json.dumps(values))
    with pytest.raises(GymError, match="precompiled_charsmap") as raised:
        act(str(folder))
    assert raised.value.code is ErrorCode.MODEL_INVALID
    assert str(folder) in raised.value.message


def test_a_chat_template_of_an_adapter_without_end_is_refused_unread(tmp_path: Path) -> None:
    (tmp_path / "chat_template.jinja").write_bytes(b"")
    os.truncate(tmp_path / "chat_template.jinja", 1 << 40)  # sparse
    endless: Any = SimpleNamespace(folder=tmp_path, name="endless")
    with pytest.raises(GymError, match=r"chat_template\.jinja has more than 4,194,304 characters"):
        adapter_tokenizer([endless], SimpleNamespace(), None, pytest.fail)
