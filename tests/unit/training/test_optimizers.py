"""Every optimiser: the loss falls, what the config says reaches it, and a stopped run goes on where it was."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from gym_fed.base.models import load_model
from gym_fed.config.train.training import TrainingConfig
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.core.registries import OPTIMIZERS
from gym_fed.evaluation import heldout_loss
from gym_fed.training.trainer import Trainer
from tests.support.quick import quick
from tests.support.tuning_cases import ROWS, config, weights

PROJECTED = {"optimizer_args": {"rank": 4, "update_proj_gap": 5}}
SETTINGS: dict[str, dict[str, Any]] = {
    "adamw": {},
    "adam_mini": {},
    "adafactor": {},
    "adagrad": {"learning_rate": 3e-2},
    "adamw_8bit": {},
    "ademamix": {"optimizer_args": {"alpha": 2.0}},
    "ademamix_8bit": {"optimizer_args": {"min_8bit_size": 64}},
    "apollo_adamw": PROJECTED,
    "badam": {"optimizer_args": {"switch_block_every": 6, "include_embedding": True}, "learning_rate": 2e-2},
    "galore_adafactor": PROJECTED,
    "galore_adamw": PROJECTED,
    "lion": {"learning_rate": 2e-3},
    "lion_8bit": {"learning_rate": 2e-3},
    "muon": {},
    "rmsprop": {},
    "schedulefree_adamw": {"warmup_steps": 2},
    "schedulefree_radam": {"learning_rate": 5e-2},
    "schedulefree_sgd": {"learning_rate": 1.0},
    "sgd": {"learning_rate": 0.3, "optimizer_args": {"momentum": 0.9}},
    "soap": {},
}
GPU_ONLY = {"galore_adamw_8bit", "paged_adamw", "paged_adamw_8bit", "paged_lion", "paged_lion_8bit"}
NO_BETAS = {
    "adafactor",
    "adagrad",
    "galore_adafactor",
    "rmsprop",
    "schedulefree_sgd",
    "sgd",
}
PACKAGES = {
    "bitsandbytes": ("8bit", "ademamix"),
    "pytorch_optimizer": ("lion", "soap", "muon", "adam_mini"),
    "galore_torch": ("galore",),
    "apollo_torch": ("apollo",),
    "badam": ("badam",),
    "schedulefree": ("schedulefree",),
}


def settings(folder: Path, name: str, **changes: Any) -> TrainingConfig:
    for package, names in PACKAGES.items():
        if any(part in name for part in names) and (package != "pytorch_optimizer" or "8bit" not in name):
            pytest.importorskip(package)
    return config(folder, optimizer=name, **{"learning_rate": 1e-2, **SETTINGS.get(name, {}), **changes})


def run(tiny_base: Path, chosen: TrainingConfig, **hooks: Any) -> Any:
    loaded = load_model(str(tiny_base))
    return Trainer(chosen, model=loaded.model, tokenizer=loaded.tokenizer, **hooks).train(ROWS)


def test_every_optimiser_is_tried_here_or_needs_a_gpu() -> None:
    assert set(SETTINGS) | GPU_ONLY == set(OPTIMIZERS.own())
    with pytest.raises(GymError, match="unknown optimizer 'adma'") as caught:
        OPTIMIZERS.new("adma")
    assert "adam_mini" in caught.value.hint
    assert "soap" in caught.value.hint


@pytest.mark.few(4, "one checkpoint for every optimiser")
@pytest.mark.parametrize(
    "name",
    quick(SETTINGS, "adamw", "adamw_8bit", "lion", "muon", "galore_adamw", "badam", "schedulefree_adamw"),
)
def test_the_loss_falls_and_a_stopped_run_ends_with_the_same_bits(
    tiny_base: Path, tmp_path: Path, name: str
) -> None:
    whole = run(tiny_base, settings(tmp_path / "whole", name, save_final=False))
    before = heldout_loss(load_model(str(tiny_base)).model, whole.tokenizer, ROWS)
    assert heldout_loss(whole.model, whole.tokenizer, ROWS) < before - 0.02
    seen: list[int] = []
    part = settings(tmp_path / "part", name, save_final=False)
    with pytest.raises(GymError, match="stopped at step 7"):
        run(tiny_base, part, on_step=lambda step, *_: seen.append(step), should_stop=lambda: len(seen) == 7)
    resumed = run(tiny_base, part)
    assert resumed.losses == whole.losses
    end = weights(whole.model)
    assert all(torch.equal(value, end[key]) for key, value in weights(resumed.model).items())


@pytest.mark.parametrize("name", quick(SETTINGS, "adamw", "sgd", "muon", "adam_mini", "soap"))
def test_rate_decay_and_betas_reach_the_optimiser(tiny_base: Path, tmp_path: Path, name: str) -> None:
    changes: dict[str, Any] = {"learning_rate": 3e-3, "weight_decay": 0.25}
    if name not in NO_BETAS:
        changes |= {"adam_beta1": 0.8, "adam_beta2": 0.97}
    chosen = settings(tmp_path / "run", name, **changes)
    OPTIMIZERS.new(name).check(chosen)
    model = load_model(str(tiny_base)).model
    optimizer = OPTIMIZERS.new(name).make(model, chosen)
    if name == "adamw":  # transformers makes it, of its own arguments
        assert optimizer is None
        return
    groups = optimizer.param_groups
    assert {group["lr"] for group in groups} == {3e-3}
    inner = optimizer.base_optimizer.param_groups if name == "badam" else groups
    # BAdam's library decays norms, too.
    assert {group["weight_decay"] for group in inner} == ({0.25} if name == "badam" else {0.25, 0.0})
    held = [value for group in groups for value in group["params"]]
    assert {id(value) for value in held} == {id(value) for value in model.parameters()}
    if name not in NO_BETAS:
        read = [tuple(group["betas"])[:2] for group in groups if not group.get("use_muon")]
        assert set(read) == {(0.8, 0.97)}


@pytest.mark.parametrize("name", SETTINGS)
def test_unknown_arguments_are_refused_with_the_known_ones(tmp_path: Path, name: str) -> None:
    with pytest.raises(GymError, match=f"{name} has no argument 'epsilom'") as caught:
        OPTIMIZERS.new(name).check(settings(tmp_path, name, optimizer_args={"epsilom": 1}))
    assert caught.value.code is ErrorCode.CONFIG_INVALID
    assert caught.value.hint.startswith("it accepts ")


@pytest.mark.parametrize("name", sorted(NO_BETAS))
def test_betas_are_refused_where_nothing_reads_them(tmp_path: Path, name: str) -> None:
    with pytest.raises(GymError, match=f"adam_beta2: optimizer {name} has no betas"):
        OPTIMIZERS.new(name).check(settings(tmp_path, name, adam_beta2=0.95))


@pytest.mark.parametrize("name", sorted(GPU_ONLY))
def test_what_needs_a_gpu_says_so_and_why(tmp_path: Path, name: str) -> None:
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    pytest.importorskip("bitsandbytes")
    pytest.importorskip("galore_torch")
    with pytest.raises(GymError, match=rf"{name} \(.*\) needs a CUDA GPU"):
        OPTIMIZERS.new(name).check(config(tmp_path, optimizer=name))


def test_a_missing_package_is_named_with_its_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import importlib.util

    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    for name, extra in (
        ("muon", "optim"),
        ("adamw_8bit", "quant"),
        ("badam", "optim"),
        ("galore_adamw", "optim"),
    ):
        with pytest.raises(GymError, match="is not installed") as caught:
            OPTIMIZERS.new(name).check(config(tmp_path, optimizer=name))
        assert caught.value.code is ErrorCode.MISSING_DEPENDENCY
        assert f"gym-fed[{extra}]" in caught.value.hint


def test_badam_says_nothing_and_names_a_block_that_is_not_there(
    tiny_base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = load_model(str(tiny_base)).model
    drawn = settings(tmp_path, "badam", optimizer_args={"switch_mode": "random", "switch_block_every": 1})
    optimizer = OPTIMIZERS.new("badam").make(model, drawn)
    for _ in range(3):
        optimizer._update_active_block_idx()
    assert capsys.readouterr().out == ""
    with pytest.raises(GymError, match="start_block is 99, but the model has fewer blocks"):
        OPTIMIZERS.new("badam").make(model, settings(tmp_path, "badam", optimizer_args={"start_block": 99}))


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"optimizer": "sgd", "optimizer_args": {"momentum": -1}}, "sgd rejects them"),
        ({"optimizer": "adamw", "optimizer_args": {"eps": -1}}, "adamw rejects them"),
        ({"optimizer": "schedulefree_adamw", "lr_scheduler_type": "cosine"}, "replaces the schedule"),
        (
            {"optimizer": "schedulefree_radam", "warmup_steps": 3},
            "warmup_steps: optimizer schedulefree_radam",
        ),
        ({"optimizer": "galore_adamw", "finetuning": "lora"}, "projects the gradients of whole weights"),
        ({"optimizer": "badam", "finetuning": "lora"}, "trains whole layers in turn"),
        ({"optimizer": "badam", "optimizer_args": {"switch_mode": "up"}}, "switch_mode 'up' is unknown"),
        ({"optimizer": "badam", "optimizer_args": {"switch_block_every": "x"}}, "switch_block_every is 'x'"),
        ({"optimizer": "badam", "optimizer_args": {"start_block": -1}}, "start_block is -1"),
        (
            {"optimizer": "badam", "optimizer_args": {"switch_block_every": None}},
            "switch_block_every is None",
        ),
        ({"optimizer": "badam", "optimizer_args": {"include_lm_head": "no"}}, "include_lm_head is 'no'"),
        ({"optimizer": "badam", "optimizer_args": {"eps": "small"}}, "badam rejects them"),
        (
            {"optimizer": "badam", "optimizer_args": {"switch_mode": "random", "start_block": 0}},
            "start_block has no effect with switch_mode random",
        ),
        (
            {"optimizer": "galore_adamw", "optimizer_args": {"rank": "x"}},
            "galore_adamw does not accept rank 'x'",
        ),
        ({"optimizer": "galore_adafactor", "optimizer_args": {"rank": 0}}, "does not accept rank 0"),
        (
            {"optimizer": "apollo_adamw", "optimizer_args": {"proj_type": "zz"}},
            "does not accept proj_type 'zz'",
        ),
        (
            {"optimizer": "apollo_adamw", "optimizer_args": {"scale_type": "row"}},
            "does not accept scale_type 'row'",
        ),
        (
            {"optimizer": "muon", "finetuning": "lora", "lora": {"loraplus_lr_ratio": 4}},
            "has its own parameter groups",
        ),
    ],
)
def test_what_an_optimiser_cannot_do_is_refused(
    tmp_path: Path, changes: dict[str, Any], problem: str
) -> None:
    chosen = settings(
        tmp_path, **{"name": changes["optimizer"], **{k: v for k, v in changes.items() if k != "optimizer"}}
    )
    with pytest.raises(GymError, match=problem):
        OPTIMIZERS.new(chosen.optimizer).check(chosen)


def test_arguments_change_what_an_optimiser_does(tiny_base: Path, tmp_path: Path) -> None:
    plain = run(tiny_base, settings(tmp_path / "a", "adamw", save_final=False))
    other = run(tiny_base, settings(tmp_path / "b", "adamw", save_final=False, optimizer_args={"eps": 0.1}))
    assert plain.losses[0] == other.losses[0]
    assert plain.losses[-1] < other.losses[-1]


def test_muon_moves_hidden_matrices_and_leaves_the_others_to_adamw(tiny_base: Path, tmp_path: Path) -> None:
    chosen = settings(tmp_path, "muon", optimizer_args={"adamw_lr": 1e-4, "momentum": 0.9})
    model = load_model(str(tiny_base)).model
    groups = OPTIMIZERS.new("muon").make(model, chosen).param_groups
    by_muon = {id(value) for group in groups if group["use_muon"] for value in group["params"]}
    names = {name for name, value in model.named_parameters() if id(value) in by_muon}
    assert len(names) == 7
    assert all("proj" in name for name in names)
    assert {group["lr"] for group in groups} == {1e-2, 1e-4}


def test_adam_mini_knows_the_width_of_a_head(tiny_base: Path, tmp_path: Path) -> None:
    model = load_model("gym-nano").model
    groups = OPTIMIZERS.new("adam_mini").make(model, settings(tmp_path, "adam_mini")).param_groups
    head = model.config.head_dim * model.config.hidden_size
    assert {group["parameter_per_head"] for group in groups if "parameter_per_head" in group} == {head}


def test_schedule_free_ends_on_the_average(tiny_base: Path, tmp_path: Path) -> None:
    chosen = settings(tmp_path / "run", "schedulefree_adamw", save_steps=12)
    result = run(tiny_base, chosen)
    again = load_model(str(tmp_path / "run"))
    kept = weights(result.model)
    assert all(torch.equal(value, kept[key]) for key, value in weights(again.model).items())
    state = torch.load(tmp_path / "run/checkpoints/checkpoint-12/optimizer.pt", weights_only=True)
    assert not any(group["train_mode"] for group in state["param_groups"])


def rates(tiny_base: Path, folder: Path, **changes: Any) -> list[float]:
    result = run(tiny_base, config(folder, save_final=False, learning_rate=1e-2, **changes))
    return [entry["learning_rate"] for entry in result.history if "learning_rate" in entry]


def test_schedules_take_their_arguments_and_a_warm_up_of_some_share(tiny_base: Path, tmp_path: Path) -> None:
    low = rates(
        tiny_base,
        tmp_path / "a",
        lr_scheduler_type="cosine_with_min_lr",
        lr_scheduler_kwargs={"min_lr_rate": 0.5},
        warmup_ratio=0.25,
    )
    assert low[1] == pytest.approx(1e-2 / 3)
    assert max(low) == pytest.approx(1e-2)
    assert 5e-3 <= low[-1] < 5.5e-3
    stable = rates(
        tiny_base,
        tmp_path / "b",
        lr_scheduler_type="warmup_stable_decay",
        lr_scheduler_kwargs={"num_decay_steps": 4},
    )
    assert stable[:8] == pytest.approx([1e-2] * 8)
    assert stable[-1] < 3e-3


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"lr_scheduler_kwargs": {"power": 2}}, "linear has no argument 'power'"),
        ({"lr_scheduler_type": "cosine_with_min_lr"}, "needs either min_lr or min_lr_rate"),
        ({"lr_scheduler_type": "warmup_stable_decay"}, "needs num_decay_steps"),
        (
            {"lr_scheduler_type": "polynomial", "lr_scheduler_kwargs": {"lr_end": 1.0}},
            "not below learning_rate",
        ),
        ({"warmup_steps": 2, "warmup_ratio": 0.1}, "not both"),
        ({"lr_scheduler_type": "constant", "warmup_ratio": 0.1}, "warmup_ratio: .* has no warm-up"),
        ({"lr_scheduler_type": "constant", "warmup_steps": 3}, "warmup_steps: .* use constant_with_warmup"),
    ],
)
def test_a_schedule_that_is_not_whole_is_refused(changes: dict[str, Any], problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        TrainingConfig(**changes)


def test_a_number_that_yaml_reads_as_text_is_a_number() -> None:
    chosen = TrainingConfig(
        optimizer_args={"eps": "1e-6", "proj_type": "std"},
        lr_scheduler_type="cosine_with_min_lr",
        lr_scheduler_kwargs={"min_lr": "1e-5"},
    )
    assert chosen.optimizer_args == {"eps": 1e-6, "proj_type": "std"}
    assert chosen.lr_scheduler_kwargs == {"min_lr": 1e-5}
