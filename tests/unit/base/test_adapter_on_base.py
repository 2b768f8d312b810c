"""An adapter goes on the base that is named, and is refused on one with other weights."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from gym_fed.base.modeling.adapter_base import BASE_RECORD, record_base
from gym_fed.base.modeling.adapters import merged
from gym_fed.base.modeling.tensor_files import folder_digest
from gym_fed.base.models import load_adapted, load_model, load_tuned
from gym_fed.cli.main import app
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.delta.base import model_tensors, tensors_digest
from tests.support.adapters import logits, run, sibling
from tests.support.peft_adapters import made


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return sibling("Llama", tmp_path_factory.mktemp("on") / "base")


@pytest.fixture(scope="module")
def other(base: Path) -> Path:
    return sibling("Llama", base.with_name("other"), seed=1)


@pytest.fixture
def adapter(base: Path, tmp_path: Path) -> Path:
    made(base, tmp_path / "adapter")
    return tmp_path / "adapter"


def rename_base(adapter: Path, name: str) -> None:
    file = adapter / "adapter_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "base_model_name_or_path": name}))


def gym(*words: object) -> Any:
    return CliRunner().invoke(app, [str(word) for word in words])


def test_a_run_records_the_digest_of_its_base(base: Path, tmp_path: Path) -> None:
    run(tmp_path / "run", model=str(base), max_steps=1)
    recorded = json.loads((tmp_path / "run" / BASE_RECORD).read_text())
    assert recorded == {"digest": tensors_digest(load_model(str(base)).model)}


def test_the_digest_of_a_folder_is_the_same_in_other_shards_and_types(base: Path, tmp_path: Path) -> None:
    loaded = load_model(str(base)).model.to(torch.bfloat16)
    loaded.save_pretrained(tmp_path / "half")
    loaded.float().save_pretrained(tmp_path / "whole", max_shard_size="10KB")
    assert folder_digest(tmp_path / "half") == folder_digest(tmp_path / "whole")
    assert folder_digest(tmp_path / "half") != folder_digest(base)


@pytest.mark.parametrize("recorded", [True, False], ids=["digest recorded", "own base here"])
def test_an_adapter_of_another_base_is_refused_by_digest(
    base: Path, other: Path, adapter: Path, recorded: bool
) -> None:
    if recorded:
        record_base(adapter, base)
        rename_base(adapter, "gone/nowhere")
    for load in (
        lambda: load_adapted(str(other), [str(adapter)]),
        lambda: load_tuned(str(adapter), str(other)),
    ):
        with pytest.raises(GymError, match="has different weights") as caught:
            load()
        assert caught.value.code is ErrorCode.BASE_MISMATCH


def test_a_recorded_digest_admits_a_base_of_another_name(base: Path, adapter: Path, tmp_path: Path) -> None:
    record_base(adapter, base)
    rename_base(adapter, "gone/nowhere")
    shutil.copytree(base, tmp_path / "renamed")
    wanted = logits(merged(load_adapted(str(base), [str(adapter)]).model))
    assert torch.equal(logits(merged(load_adapted(str(tmp_path / "renamed"), [str(adapter)]).model)), wanted)


def test_an_adapter_without_a_digest_whose_base_is_gone_is_taken_with_a_warning_that_names_both(
    other: Path, adapter: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rename_base(adapter, "gone/nowhere")
    load_adapted(str(other), [str(adapter)])
    assert "was trained on gone/nowhere and is loaded on" in caplog.text
    assert str(other) in caplog.text


def test_the_base_that_is_named_overrides_the_path_in_the_adapter(
    base: Path, adapter: Path, tmp_path: Path
) -> None:
    wanted = logits(load_model(str(adapter)).model)
    rename_base(adapter, str(tmp_path / "gone"))
    encoded = gym("delta", "encode", base, adapter, "-o", tmp_path / "d.gymdelta", "--codec", "dense")
    assert encoded.exit_code == 0, encoded.output
    soup = gym("soup", "merge", adapter, "--base", base, "--rule", "mean", "-o", tmp_path / "s.gymdelta")
    assert soup.exit_code == 0, soup.output
    exported = gym("export", adapter, "--base", base, "-o", tmp_path / "whole", "--skip-check")
    assert exported.exit_code == 0, exported.output
    torch.testing.assert_close(logits(tmp_path / "whole"), wanted, rtol=0, atol=1e-5)
    for file in ("d", "s"):
        out = tmp_path / f"applied-{file}"
        applied = gym("delta", "apply", base, tmp_path / f"{file}.gymdelta", "-o", out)
        assert applied.exit_code == 0, applied.output
        effect = (wanted - logits(base)).norm()
        assert (logits(out) - wanted).norm() < 0.03 * effect


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"r": 2}, "size mismatch"),
        ({"r": 64}, "says rank 64, but its weights have at most 4"),
        ({"target_modules": ["nothing_proj"]}, "nothing_proj"),
        ({"target_modules": ["q_proj", "v_proj", "up_proj"]}, "missing adapter keys"),
    ],
)
def test_an_adapter_whose_config_contradicts_its_weights_is_refused_with_the_reason(
    base: Path, adapter: Path, change: dict[str, Any], says: str
) -> None:
    file = adapter / "adapter_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **change}))
    with pytest.raises(GymError, match=says) as caught:
        load_model(str(adapter))
    assert caught.value.code is ErrorCode.MODEL_INVALID


def test_an_adapter_with_weights_of_layers_that_its_config_does_not_name_is_refused(
    base: Path, adapter: Path
) -> None:
    weights = load_file(adapter / "adapter_model.safetensors")
    weights["base_model.model.model.layers.0.mlp.up_proj.lora_A.weight"] = torch.ones(4, 16)
    save_file(weights, adapter / "adapter_model.safetensors", {"format": "pt"})
    with pytest.raises(GymError, match=r"up_proj"):
        load_model(str(adapter))


def test_a_negative_weight_takes_a_fine_tune_away_from_the_base(
    base: Path, adapter: Path, tmp_path: Path
) -> None:
    words = ["soup", "merge", adapter, "--base", base, "--weight", "-1", "--codec", "exact"]
    done = gym(*words, "--rule", "task_arithmetic", "-o", tmp_path / "s.gymdelta")
    assert done.exit_code == 0, done.output
    gym("delta", "apply", base, tmp_path / "s.gymdelta", "-o", tmp_path / "negated")
    old = model_tensors(load_model(str(base)).model)
    new = model_tensors(merged(load_model(str(adapter)).model))
    found = model_tensors(load_model(str(tmp_path / "negated")).model)
    for name in old:
        torch.testing.assert_close(found[name] - old[name], old[name] - new[name], rtol=0, atol=1e-6)
    refused = gym(*words, "--rule", "linear", "-o", tmp_path / "t.gymdelta")
    assert isinstance(refused.exception, GymError)
    assert "--rule task_arithmetic" in refused.exception.hint
