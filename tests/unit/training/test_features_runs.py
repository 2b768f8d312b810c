"""Features of the model's code in whole runs: each key changes something, is gone afterwards, or is refused."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch

from gym_fed.base.models import load_model
from gym_fed.config.train.training import TrainingConfig
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.core.registries import FEATURES
from gym_fed.data import generate
from gym_fed.training.features.base import active_features
from gym_fed.training.run.checks import check_config
from gym_fed.training.trainer import Trainer

ROWS = generate("copy", 40)
ON_CPU = pytest.mark.skipif(torch.cuda.is_available(), reason="tests the errors of a machine without CUDA")


def config(folder: Path, **changes: Any) -> TrainingConfig:
    values = {
        "output_dir": folder,
        "max_steps": 3,
        "per_device_train_batch_size": 4,
        "max_length": 48,
        "device": "cpu",
        "num_threads": 1,
        "save_final": False,
    }
    return TrainingConfig(**{**values, **changes})


def run(base: Path, folder: Path, **changes: Any) -> Any:
    loaded = load_model(str(base))
    return Trainer(config(folder, **changes), model=loaded.model, tokenizer=loaded.tokenizer).train(ROWS)


def test_every_feature_is_a_key_and_is_off_by_default() -> None:
    assert set(FEATURES.own()) <= set(TrainingConfig.model_fields)
    assert active_features(TrainingConfig()) == {}


def test_bf16_computes_in_16_bits_and_keeps_weights_in_32(tiny_base: Path, tmp_path: Path) -> None:
    loaded = load_model(str(tiny_base))
    seen: set[torch.dtype] = set()
    layer = loaded.model.model.layers[0].mlp.down_proj
    handle = layer.register_forward_hook(lambda module, args, output: seen.add(output.dtype))
    settings = config(tmp_path / "run", mixed_precision="bf16", device="auto")
    result = Trainer(settings, model=loaded.model, tokenizer=loaded.tokenizer).train(ROWS)
    handle.remove()
    assert seen == {torch.bfloat16}
    assert {p.dtype for p in result.model.parameters()} == {torch.float32}
    plain = run(tiny_base, tmp_path / "plain")
    assert result.losses != plain.losses
    assert result.losses == pytest.approx(plain.losses, rel=0.02)


@pytest.mark.parametrize("finetuning", ["full", "lora"])
def test_checkpointing_computes_blocks_twice_with_the_same_losses(
    tiny_base: Path, tmp_path: Path, finetuning: str
) -> None:
    def counted(folder: Path, **changes: Any) -> tuple[list[float], int]:
        loaded = load_model(str(tiny_base))
        calls: list[bool] = []
        loaded.model.model.layers[0].input_layernorm.register_forward_hook(lambda *_: calls.append(True))
        settings = config(folder, finetuning=finetuning, **changes)
        result = Trainer(settings, model=loaded.model, tokenizer=loaded.tokenizer).train(ROWS)
        assert not loaded.model.is_gradient_checkpointing
        return result.losses, len(calls)

    plain, once = counted(tmp_path / "plain")
    again, twice = counted(tmp_path / "again", gradient_checkpointing=True)
    assert again == pytest.approx(plain, rel=1e-6)
    assert (once, twice) == (3, 6)


@pytest.mark.slow  # compiles
def test_compiling_runs_through_dynamo_and_saves_the_model_as_it_was(tiny_base: Path, tmp_path: Path) -> None:
    from torch._dynamo.utils import counters

    counters.clear()
    result = run(
        tiny_base,
        tmp_path / "run",
        torch_compile=True,
        torch_compile_backend="eager",
        save_final=True,
        group_by_length=True,
    )
    assert counters["stats"]["unique_graphs"] > 0
    assert set(result.model.state_dict()) == set(load_model(str(tmp_path / "run")).model.state_dict())
    torch._dynamo.reset()


def test_the_attention_asked_for_runs_and_the_former_comes_back(
    tiny_base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers.models.qwen3 import modeling_qwen3

    calls: list[str] = []
    eager = modeling_qwen3.eager_attention_forward
    monkeypatch.setattr(
        modeling_qwen3,
        "eager_attention_forward",
        lambda module, *args, **kwargs: (
            calls.append(module.config._attn_implementation),
            eager(module, *args, **kwargs),
        )[1],
    )
    plain = run(tiny_base, tmp_path / "plain")
    assert calls == []
    result = run(tiny_base, tmp_path / "run", attention="eager")
    assert calls == ["eager"] * 3
    assert result.losses == pytest.approx(plain.losses, rel=1e-4)
    assert result.model.config._attn_implementation == "sdpa"


def test_neftune_adds_noise_while_training_only(tiny_base: Path, tmp_path: Path) -> None:
    loaded = load_model(str(tiny_base))
    differences: list[float] = []

    def compare(module: Any, args: Any, kwargs: Any) -> None:
        clean = loaded.model.get_input_embeddings().weight[asked[-1]]
        differences.append(float((args[0] - clean).detach().abs().max() * clean[0].numel() ** 0.5))

    asked: list[torch.Tensor] = []
    loaded.model.register_forward_pre_hook(
        lambda module, args, kwargs: asked.append(kwargs["input_ids"]), with_kwargs=True
    )
    loaded.model.model.layers[0].register_forward_pre_hook(compare, with_kwargs=True)
    settings = config(tmp_path / "run", neftune_noise_alpha=5.0)
    Trainer(settings, model=loaded.model, tokenizer=loaded.tokenizer).train(ROWS)
    assert differences == pytest.approx([5.0] * 3, rel=0.01)  # uniform: the largest is close to the bound
    loaded.model(input_ids=asked[-1])
    assert differences[-1] == 0
    assert not loaded.model.get_input_embeddings()._forward_hooks
    with pytest.raises(GymError, match="neftune_noise_alpha: grpo would generate its answers with the noise"):
        check_config(
            config(tmp_path, algorithm="grpo", neftune_noise_alpha=5.0, gradient_accumulation_steps=2)
        )


@pytest.mark.parametrize(
    ("changes", "code", "words"),
    [
        ({"mixed_precision": "fp16"}, ErrorCode.CONFIG_INVALID, "fp16 needs a CUDA GPU"),
        ({"attention": "flash_attention_2"}, ErrorCode.CONFIG_INVALID, "flash_attention_2 needs a CUDA GPU"),
        ({"attention": "flex_attention"}, ErrorCode.CONFIG_INVALID, "flex_attention needs a CUDA GPU"),
        ({"liger": True}, ErrorCode.CONFIG_INVALID, "liger: true needs a CUDA GPU"),
        ({"unsloth": True}, ErrorCode.CONFIG_INVALID, "unsloth: true needs a CUDA GPU"),
        (
            {"torch_compile": True, "torch_compile_backend": "gcc"},
            ErrorCode.CONFIG_INVALID,
            "'gcc' is unknown",
        ),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else None,
)
@ON_CPU
def test_what_this_machine_cannot_do_is_refused_before_a_model_is_read(
    tmp_path: Path, changes: dict[str, Any], code: ErrorCode, words: str
) -> None:
    with pytest.raises(GymError, match=words) as caught:
        Trainer(config(tmp_path / "run", model="no/such-model", **changes))
    assert caught.value.code is code
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("changes", "package"),
    [
        ({"attention": "flash_attention_2", "mixed_precision": "bf16"}, "flash_attn"),
        ({"liger": True}, "liger_kernel"),
        ({"unsloth": True}, "unsloth"),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_with_a_gpu_it_is_the_missing_package_that_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], package: str
) -> None:
    if importlib.util.find_spec(package) is not None:
        pytest.skip(f"{package} is installed here")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(GymError, match=f"needs the package {package}") as caught:
        Trainer(config(tmp_path / "run", model="gym-nano", **changes))
    assert caught.value.code is ErrorCode.MISSING_DEPENDENCY


def test_inductor_without_a_compiler_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(GymError, match="inductor needs a C\\+\\+ compiler") as caught:
        Trainer(config(tmp_path / "run", model="gym-nano", torch_compile=True))
    assert caught.value.code is ErrorCode.MISSING_DEPENDENCY


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"torch_compile_backend": "inductor"}, "torch_compile is off"),
        ({"mixed_precision": "bf16", "dtype": "bfloat16"}, "keeps weights in float32"),
        ({"shift_attention": {}, "attention": "sdpa"}, "has its own implementation"),
        ({"rope_scaling": {"type": "linear", "factor": 2, "beta_fast": 1}}, "beta_fast has no effect"),
        ({"rope_scaling": {"type": "longrope", "factor": 2}}, "needs long_factor and short_factor"),
        ({"rope_scaling": {"type": "llama3", "factor": 2}}, "needs high_freq_factor and low_freq_factor"),
    ],
)
def test_keys_that_contradict_each_other_are_refused(values: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        TrainingConfig(**values)
