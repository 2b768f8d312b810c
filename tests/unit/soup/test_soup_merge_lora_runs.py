"""`gym soup merge` of LoRA runs: their factors are merged as factors, where a run is its base and factors alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from typer.testing import CliRunner

from gym_fed.cli.main import app
from gym_fed.cli.soup.inputs import _factors_alone
from gym_fed.delta.file import DeltaFile
from gym_fed.models import load_model


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


def test_a_run_that_differs_by_more_than_factors_is_merged_as_whole_matrices(tiny_base: Path) -> None:
    base = load_model(str(tiny_base)).model
    assert _factors_alone(adapted(tiny_base, 0), base)
    assert _factors_alone(adapted(tiny_base, 0, use_dora=True), base) is None
    assert _factors_alone(adapted(tiny_base, 0, modules_to_save=["norm"]), base) is None
    moved = adapted(tiny_base, 0)
    with torch.no_grad():
        moved.get_base_model().model.norm.weight.add_(0.01)
    assert _factors_alone(moved, base) is None
