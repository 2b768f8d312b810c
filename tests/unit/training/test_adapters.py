"""Runs that start from adapters: trained on, merged first, refused where they do not belong."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from gym_fed.base.modeling.adapter_base import BASE_RECORD
from gym_fed.base.modeling.adapters import merge_adapters, read_adapter
from gym_fed.base.models import load_model
from gym_fed.config.train.training import TrainingConfig
from gym_fed.config.yaml.file import load_config
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.training.model.adapters import check_adapters
from gym_fed.training.trainer import Trainer
from tests.support.adapters import ROWS, logits, run, settings, sibling
from tests.support.quick import quick
from tests.support.tuning_cases import CASES

_LORA = {"r": 4, "lora_alpha": 12, "target_modules": ["q_proj", "v_proj"]}
_NOT_TRAINED_ON = {"full", "freeze", "adalora"}


@pytest.fixture(scope="module", params=["Qwen3", "Llama", "Qwen3Moe"])
def stages(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A base of a real class, and an adapter of it that SFT has trained."""
    folder = tmp_path_factory.mktemp(request.param)
    base = sibling(request.param, folder / "base")
    run(folder / "sft", model=str(base), lora=_LORA)
    return base, folder / "sft"


@pytest.fixture(scope="module")
def sft(tiny_base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An adapter of ``tiny_base``."""
    folder = tmp_path_factory.mktemp("stages") / "sft"
    run(folder, model=str(tiny_base), lora=_LORA)
    return folder


def test_dpo_trains_on_the_adapter_of_sft_and_is_held_against_it(
    stages: tuple[Path, Path], tmp_path: Path
) -> None:
    base, adapter = stages
    result = run(tmp_path / "dpo", model=str(base), adapter=str(adapter), algorithm="dpo", logging_steps=1)
    margins = [entry["rewards/margins"] for entry in result.history if "rewards/margins" in entry]
    assert abs(margins[0]) < 1e-5, "the reference is the adapter as it was"
    assert abs(margins[-1]) > 1e-4, "and does not move with it"
    assert list(result.model.peft_config) == ["default"]
    assert (logits(tmp_path / "dpo") - logits(adapter)).abs().max() > 1e-3
    torch.testing.assert_close(logits(tmp_path / "dpo"), logits(result.model), rtol=0, atol=2e-6)
    kept = load_config(tmp_path / "dpo/config.yaml", TrainingConfig)
    assert kept.lora is not None
    assert (kept.lora.r, kept.lora.lora_alpha, kept.lora.target_modules) == (4, 12, ["q_proj", "v_proj"])
    before, after = (
        load_file(folder / "adapter_model.safetensors") for folder in (adapter, tmp_path / "dpo")
    )
    assert before.keys() == after.keys()


@pytest.mark.few(3, "one path for every kind")
@pytest.mark.parametrize(
    "name",
    quick(
        [name for name in CASES if CASES[name]["finetuning"] not in _NOT_TRAINED_ON],
        *("oft", "vera", "ia3", "dora", "pissa", "embeddings"),
    ),
)
def test_every_kind_of_adapter_goes_on_from_where_it_ended(
    tiny_base: Path, tmp_path: Path, name: str
) -> None:
    run(tmp_path / "a", model=str(tiny_base), max_steps=2, **CASES[name])
    case = {key: value for key, value in CASES[name].items() if key == "finetuning"}
    again = {"adapter": str(tmp_path / "a"), "learning_rate": 1e-12, "max_steps": 1}
    result = run(tmp_path / "b", model=str(tiny_base), **case, **again)
    torch.testing.assert_close(logits(tmp_path / "b"), logits(tmp_path / "a"), rtol=0, atol=1e-6)
    trained = {key for key, value in result.model.named_parameters() if value.requires_grad}
    assert trained
    assert not any("base_layer" in key for key in trained)


@pytest.mark.parametrize("algorithm", ["kto", "tdpo"])
def test_other_algorithms_with_a_reference_take_the_adapter_as_it_was(
    tiny_base: Path, sft: Path, tmp_path: Path, algorithm: str
) -> None:
    batch = {"per_device_train_batch_size": 8, "logging_steps": 1}
    result = run(tmp_path / "b", model=str(tiny_base), adapter=str(sft), algorithm=algorithm, **batch)
    noted = [entry["rewards/margins"] for entry in result.history if "rewards/margins" in entry]
    assert abs(noted[0]) < 1e-5
    assert abs(noted[-1]) > 1e-5


def test_the_copy_of_a_policy_shares_the_weights_that_are_not_trained(tiny_base: Path, sft: Path) -> None:
    from gym_fed.training.model.adapters import continued_adapter, resolve_adapters
    from gym_fed.training.model.peft_models import resume_adapter
    from gym_fed.training.model.reference import copy_at_start

    config = resolve_adapters(settings(Path("unused"), model=str(tiny_base), adapter=str(sft)))
    adapter = continued_adapter(config)
    assert adapter is not None
    policy = resume_adapter(load_model(str(tiny_base)).model, adapter, config)
    copied = dict(copy_at_start(policy).named_parameters())
    for name, value in policy.get_base_model().named_parameters():
        assert (copied[name].data_ptr() == value.data_ptr()) == (not value.requires_grad), name
        assert not copied[name].requires_grad


def test_several_adapters_are_merged_and_the_last_is_trained_on(
    stages: tuple[Path, Path], tmp_path: Path
) -> None:
    base, first = stages
    run(tmp_path / "second", model=str(base), adapter=str(first), new_adapter=True, seed=1)
    merged = load_model(str(first)).model.merge_and_unload()
    inside = load_file(tmp_path / "second/base_adapters/1/adapter_model.safetensors")
    assert inside.keys() == load_file(first / "adapter_model.safetensors").keys()
    frozen = {"learning_rate": 1e-12, "max_steps": 1}
    wanted = logits(tmp_path / "second")
    assert (wanted - logits(merged)).abs().max() > 1e-4
    for number, adapters in enumerate(([str(tmp_path / "second")], [str(first), str(tmp_path / "second")])):
        folder = tmp_path / f"on{number}"
        run(folder, model=str(base), adapter=adapters, **frozen)
        torch.testing.assert_close(logits(folder), wanted, rtol=0, atol=2e-6)
    whole = run(
        tmp_path / "full", model=str(base), adapter=str(tmp_path / "second"), finetuning="full", **frozen
    )
    torch.testing.assert_close(logits(whole.model), wanted, rtol=0, atol=2e-6)
    torch.testing.assert_close(logits(tmp_path / "full"), wanted, rtol=0, atol=2e-6)


def test_an_adapter_finds_what_it_stands_on_after_it_was_moved(
    tiny_base: Path, sft: Path, tmp_path: Path
) -> None:
    first = Path(shutil.copytree(sft, tmp_path / "first"))
    run(tmp_path / "second", model=str(tiny_base), adapter=str(first), new_adapter=True)
    wanted = logits(tmp_path / "second")
    (tmp_path / "second").rename(tmp_path / "moved")
    shutil.rmtree(first)
    torch.testing.assert_close(logits(tmp_path / "moved"), wanted, rtol=0, atol=0)


def test_adapters_in_an_order_in_which_they_were_not_trained_are_refused(
    tiny_base: Path, sft: Path, tmp_path: Path
) -> None:
    run(tmp_path / "other", model=str(tiny_base), seed=5)
    run(tmp_path / "second", model=str(tiny_base), adapter=str(sft), new_adapter=True)
    with pytest.raises(GymError, match="which differ from those listed before it") as caught:
        run(tmp_path / "b", model=str(tiny_base), adapter=[str(tmp_path / "other"), str(tmp_path / "second")])
    assert caught.value.code is ErrorCode.CONFIG_INVALID
    assert not (tmp_path / "b").exists()


def test_an_adapter_of_another_base_is_refused_by_digest_and_otherwise_both_are_named(
    tiny_base: Path, sft: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    other = sibling("Qwen3", tmp_path / "other", seed=7)
    with pytest.raises(GymError, match="has different weights") as caught:
        run(tmp_path / "b", model=str(other), adapter=str(sft))
    assert str(tiny_base) in str(caught.value)
    assert str(other) in str(caught.value)
    copied = shutil.copytree(tiny_base, tmp_path / "renamed")
    assert run(tmp_path / "c", model=str(copied), adapter=str(sft), max_steps=1).steps == 1
    away = Path(shutil.copytree(sft, tmp_path / "away"))
    named(away, "someone/another-model")
    assert run(tmp_path / "d", model=str(tiny_base), adapter=str(away), max_steps=1).steps == 1
    assert "someone/another-model" not in caplog.text, "its digest was recorded"
    (away / BASE_RECORD).unlink()
    assert run(tmp_path / "e", model=str(tiny_base), adapter=str(away), max_steps=1).steps == 1
    assert f"was trained on someone/another-model and is loaded on {tiny_base}" in caplog.text
    caplog.clear()
    named(away, f"someone/{tiny_base.name}-bnb-4bit")
    assert run(tmp_path / "f", model=str(tiny_base), adapter=str(away), max_steps=1).steps == 1
    assert "was trained on" not in caplog.text


def named(adapter: Path, base: str | None) -> None:
    file = adapter / "adapter_config.json"
    values = json.loads(file.read_text()) | {"base_model_name_or_path": base}
    file.write_text(json.dumps(values))


def test_shapes_that_do_not_fit_are_refused_with_the_weight(sft: Path, tmp_path: Path) -> None:
    wide = sibling("Qwen3", tmp_path / "wide", hidden_size=32)
    adapter = Path(shutil.copytree(sft, tmp_path / "adapter"))
    named(adapter, None)
    (adapter / BASE_RECORD).unlink()
    with pytest.raises(GymError, match=r"q_proj.* is \[4, 16\], but the model expects \[4, 32\]") as caught:
        run(tmp_path / "b", model=str(wide), adapter=str(adapter))
    assert caught.value.code is ErrorCode.MODEL_INVALID
    with pytest.raises(GymError, match="size mismatch"):
        run(tmp_path / "c", model=str(wide), adapter=str(adapter), new_adapter=True)


@pytest.mark.parametrize(
    ("section", "says"),
    [
        ({"r": 8}, r"lora\.r is 8, but the adapter .*sft has 4"),
        ({"use_dora": True}, r"lora\.use_dora is True, but the adapter .*sft has False"),
        (
            {"target_modules": "all-linear"},
            r"is 'all-linear', but the adapter .*sft has \['q_proj', 'v_proj'\]",
        ),
        ({"target_modules": ["q_proj"]}, r"they differ in .*v_proj"),
        ({"init_lora_weights": "pissa"}, "is already trained"),
    ],
)
def test_a_section_that_contradicts_the_adapter_is_refused_and_both_are_named(
    tiny_base: Path, sft: Path, tmp_path: Path, section: dict[str, Any], says: str
) -> None:
    with pytest.raises(GymError, match=says) as caught:
        run(tmp_path / "b", model=str(tiny_base), adapter=str(sft), lora=section)
    assert caught.value.code is ErrorCode.CONFIG_INVALID


def test_a_section_that_says_the_same_in_other_words_is_taken(
    tiny_base: Path, sft: Path, tmp_path: Path
) -> None:
    same = {"r": 4, "target_modules": r".*\.(q|v)_proj", "lora_dropout": 0.1}
    result = run(tmp_path / "b", model=str(tiny_base), adapter=str(sft), lora=same, max_steps=1)
    assert result.model.peft_config["default"].lora_dropout == 0.1
    run(tmp_path / "all", model=str(tiny_base), max_steps=1)
    again = {"adapter": str(tmp_path / "all"), "lora": {"target_modules": "all-linear"}, "max_steps": 1}
    assert run(tmp_path / "c", model=str(tiny_base), **again).steps == 1


def test_what_cannot_be_gone_on_with_is_refused_by_name(tiny_base: Path, sft: Path, tmp_path: Path) -> None:
    def refused(says: str, **changes: Any) -> None:
        with pytest.raises(GymError, match=says):
            run(tmp_path / "b", **{"model": str(tiny_base), "adapter": str(sft), **changes})

    refused("finetuning: ia3, but the adapter .* is lora", finetuning="ia3")
    refused("contains no adapter", adapter=str(tiny_base))
    refused("quantised weights", adapter=str(sft), new_adapter=True, quantization={"bits": 4})
    refused("needs SEQ_CLS", algorithm="reward_model")
    split = settings(
        tmp_path / "b", model=str(tiny_base), adapter=str(sft), distributed={"strategy": "fsdp2"}
    )
    with pytest.raises(GymError, match="incompatible with distributed"):
        check_adapters(split)
    unconverted = Path(shutil.copytree(sft, tmp_path / "pissa"))
    file = unconverted / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"init_lora_weights": "pissa"}))
    refused("init_lora_weights is pissa", adapter=str(unconverted))
    loaded = load_model(str(tiny_base))
    with pytest.raises(GymError, match="merged into the model in memory"):
        Trainer(
            settings(tmp_path / "b", adapter=str(sft), new_adapter=True),
            model=loaded.model,
            tokenizer=loaded.tokenizer,
        ).train(ROWS)


def test_adapters_of_peft_itself_are_trained_on(tiny_base: Path, tmp_path: Path) -> None:
    from peft import LoraConfig, get_peft_model

    made = LoraConfig(
        r=4,
        lora_alpha=9,
        use_rslora=True,
        target_modules=["q_proj"],
        modules_to_save=["norm"],
        task_type="CAUSAL_LM",
    )
    torch.manual_seed(3)
    model = get_peft_model(load_model(str(tiny_base)).model, made)
    for name, value in model.named_parameters():
        if "lora_B" in name or "modules_to_save" in name:
            torch.nn.init.normal_(value, std=0.5)
    wanted = logits(model)
    model.save_pretrained(str(tmp_path / "theirs"))
    kept = {
        "model": str(tiny_base),
        "adapter": str(tmp_path / "theirs"),
        "learning_rate": 1e-12,
        "max_steps": 1,
    }
    result = run(tmp_path / "b", **kept)
    torch.testing.assert_close(logits(tmp_path / "b"), wanted, rtol=0, atol=2e-5)
    assert any(
        "modules_to_save" in name for name, value in result.model.named_parameters() if value.requires_grad
    )


def test_adapters_of_peft_that_cannot_be_gone_on_with_are_refused_before_training(
    tiny_base: Path, tmp_path: Path
) -> None:
    from peft import LoraConfig, PromptTuningConfig, get_peft_model

    def saved(name: str, made: Any) -> str:
        get_peft_model(load_model(str(tiny_base)).model, made).save_pretrained(str(tmp_path / name))
        return str(tmp_path / name)

    virtual = saved("virtual", PromptTuningConfig(num_virtual_tokens=4, task_type="CAUSAL_LM"))
    for new in (False, True):
        with pytest.raises(GymError, match="is PROMPT_TUNING, which changes the input but no weights"):
            run(tmp_path / "out", model=str(tiny_base), adapter=virtual, new_adapter=new)
    with pytest.raises(GymError, match="is PROMPT_TUNING"):
        merge_adapters(load_model(str(tiny_base)).model, [read_adapter("virtual", Path(virtual))])
    single = LoraConfig(r=2, target_modules=["q_proj"], trainable_token_indices=[3], task_type="CAUSAL_LM")
    single_tokens = {"model": str(tiny_base), "adapter": saved("single", single), "max_steps": 1}
    with pytest.raises(GymError, match="has trainable_token_indices") as caught:
        run(tmp_path / "out", **single_tokens)
    assert "new_adapter: true" in caught.value.hint
    run(tmp_path / "merged", new_adapter=True, **single_tokens)


def test_beside_a_base_in_few_bits_the_adapter_goes_on(tiny_base: Path, sft: Path, tmp_path: Path) -> None:
    pytest.importorskip("bitsandbytes")
    few = {"quantization": {"bits": 4}, "model": str(tiny_base), "adapter": str(sft)}
    result = run(tmp_path / "b", algorithm="dpo", logging_steps=1, **few)
    margins = [entry["rewards/margins"] for entry in result.history if "rewards/margins" in entry]
    assert abs(margins[0]) < 1e-5
    start, end = (load_file(folder / "adapter_model.safetensors") for folder in (sft, tmp_path / "b"))
    assert start.keys() == end.keys()
    assert all(0 < (end[key] - value).abs().max() < 0.5 for key, value in start.items())


def test_a_run_that_was_stopped_ends_with_the_same_bits_and_refuses_a_changed_adapter(
    tiny_base: Path, sft: Path, tmp_path: Path
) -> None:
    from tests.support.preferences import ROWS as PAIRS

    adapter = Path(shutil.copytree(sft, tmp_path / "adapter"))
    common = {"model": str(tiny_base), "adapter": str(adapter), "algorithm": "dpo", "max_steps": 4}
    run(tmp_path / "whole", **common)
    steps: list[int] = []
    stopped = Trainer(
        settings(tmp_path / "parts", **common),
        on_step=lambda step, *_: steps.append(step),
        should_stop=lambda: steps[-1:] == [2],
    )
    with pytest.raises(GymError, match="stopped"):
        stopped.train(PAIRS[:16])
    weights = (adapter / "adapter_model.safetensors").read_bytes()
    others = {key: 2 * value for key, value in load_file(adapter / "adapter_model.safetensors").items()}
    save_file(others, adapter / "adapter_model.safetensors", {"format": "pt"})
    with pytest.raises(GymError, match="their files have changed since"):
        run(tmp_path / "parts", **common)
    (adapter / "adapter_model.safetensors").write_bytes(weights)
    run(tmp_path / "parts", **common)
    whole, parts = (load_file(tmp_path / name / "adapter_model.safetensors") for name in ("whole", "parts"))
    assert all(torch.equal(whole[key], parts[key]) for key in whole)


def test_the_policy_is_compared_with_the_reference_that_is_named(
    tiny_base: Path, sft: Path, tmp_path: Path
) -> None:
    named = {"algorithm": "dpo", "logging_steps": 1, "reference_adapter": str(sft), "max_steps": 1}
    same = run(tmp_path / "a", model=str(tiny_base), adapter=str(sft), **named)
    other = run(tmp_path / "b", model=str(tiny_base), **named)
    first, second = (result.history[0]["rewards/margins"] for result in (same, other))
    assert abs(first) < 1e-4
    assert abs(second) > 1e-4, "the base differs from the adapter that it is compared with"
    for algorithm in ("orpo", "sft"):
        with pytest.raises(GymError, match=f"reference_model: {algorithm} does not use a reference model"):
            Trainer(
                settings(tmp_path / "c", model="gym-nano", algorithm=algorithm, reference_model="gym-nano")
            )
