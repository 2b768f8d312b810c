"""`gym soup merge` of LoRA runs: factors are merged as factors, and other tensors that a run changed as values."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from typer.testing import CliRunner

from gym_fed.base.models import load_model
from gym_fed.cli.main import app
from gym_fed.delta.base import model_tensors
from gym_fed.delta.factors import lora_change
from gym_fed.delta.file import DeltaFile


def adapted(base: Path, seed: int, **settings: Any) -> Any:
    model = load_model(str(base)).model
    tuned = get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj", "v_proj"], **settings))
    tuned.peft_config["default"].base_model_name_or_path = str(base)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, values in tuned.named_parameters():
            if "lora_" in name:
                values.copy_(0.02 * torch.randn(values.shape, generator=generator))
    return tuned


def test_the_mean_of_two_lora_runs_is_stacked_factors_of_their_mean(tmp_path: Path, tiny_base: Path) -> None:
    runs = []
    for seed in range(2):
        tuned = adapted(tiny_base, seed)
        tuned.save_pretrained(tmp_path / str(seed))
        runs.append(tuned.merge_and_unload().state_dict())
    soup = tmp_path / "soup.gymdelta"
    words = ["soup", "merge", str(tmp_path / "0"), str(tmp_path / "1"), "--rule", "mean", "-o", str(soup)]
    done = CliRunner().invoke(app, [*words, "--codec", "as-merged"])
    assert done.exit_code == 0, (done.output, done.exception)
    base = load_model(str(tiny_base)).model.state_dict()
    with DeltaFile.open(soup) as delta:
        assert {delta.record(name).codec for name in delta.names} == {"lora"}
        for name in delta.names:
            mean = (runs[0][name] + runs[1][name]) / 2 - base[name]
            assert torch.allclose(delta.decode(name), mean, atol=1e-2 * float(mean.abs().max()))


def test_a_run_that_changes_more_than_factors_keeps_its_factors_and_the_other_tensors_as_values(
    tiny_base: Path,
) -> None:
    base = model_tensors(load_model(str(tiny_base)).model)
    factors = {f"model.layers.0.self_attn.{name}.weight" for name in ("q_proj", "v_proj")}
    plain = lora_change(adapted(tiny_base, 0), base)
    assert (plain.factors.keys(), plain.values.keys()) == (factors, set())
    dora = lora_change(adapted(tiny_base, 0, use_dora=True), base)
    assert (dora.factors.keys(), dora.values.keys()) == (set(), factors)
    moved = adapted(tiny_base, 0)
    with torch.no_grad():
        moved.get_base_model().model.norm.weight.add_(0.01)
        moved.get_base_model().model.layers[0].self_attn.q_proj.base_layer.weight.add_(0.01)
    change = lora_change(moved, base)
    assert change.factors.keys() == {"model.layers.0.self_attn.v_proj.weight"}
    assert change.values.keys() == factors - change.factors.keys() | {"model.norm.weight"}


def test_a_run_with_saved_norms_brings_them_into_the_soup(tmp_path: Path, tiny_base: Path) -> None:
    tuned = adapted(tiny_base, 0, modules_to_save=["norm"])
    with torch.no_grad():
        tuned.get_base_model().model.norm.modules_to_save["default"].weight.add_(0.25)
    tuned.save_pretrained(tmp_path / "run")
    soup = tmp_path / "soup.gymdelta"
    words = ["soup", "merge", str(tmp_path / "run"), "--rule", "mean", "-o", str(soup)]
    CliRunner().invoke(app, words, catch_exceptions=False)
    with DeltaFile.open(soup) as delta:
        assert torch.allclose(delta.decode("model.norm.weight"), torch.full((16,), 0.25), rtol=0.02)
