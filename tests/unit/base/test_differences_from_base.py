"""A fine-tune that differs from its base in more than weights is refused by name, or encoded on request."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from gym_fed.base.modeling.differences import require_same_settings
from gym_fed.cli.main import app
from gym_fed.config.hub.soup import DeltaSoupConfig
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.quantization.config import CalibratedPolicy
from gym_fed.quantization.quantizer import Quantizer
from gym_fed.soup.delta_soup import DeltaSoup

EXACT = CalibratedPolicy(codec="dense", dense_dtype="float32", distill_steps=0, calibration_samples=0)


def fine_tune(base: Path, folder: Path, config: dict[str, Any] | None = None) -> Path:
    """A copy of ``base`` with other weights, and with these keys of its config."""
    shutil.copytree(base, folder)
    tensors = load_file(folder / "model.safetensors")
    torch.manual_seed(3)
    save_file(
        {name: value + 0.01 * torch.randn_like(value) for name, value in tensors.items()},
        folder / "model.safetensors",
        {"format": "pt"},
    )
    values = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(values | (config or {})))
    return folder


def swap_two_tokens(folder: Path) -> None:
    file = folder / "tokenizer.json"
    values = json.loads(file.read_text())
    vocabulary = values["model"]["vocab"]
    one, other = list(vocabulary)[70:72]
    vocabulary[one], vocabulary[other] = vocabulary[other], vocabulary[one]
    file.write_text(json.dumps(values))


CASES: list[tuple[dict[str, Any], Callable[[Path], None], str]] = [
    (
        {"rope_parameters": {"rope_type": "default", "rope_theta": 77.0}},
        lambda _: None,
        r"rope_parameters\.rope_theta: 10000.* -> 77",
    ),
    ({"hidden_act": "gelu"}, lambda _: None, "hidden_act: silu -> gelu"),
    ({"rms_norm_eps": 0.5}, lambda _: None, "rms_norm_eps: 1e-06 -> 0.5"),
    ({}, swap_two_tokens, "tokenizer: different ids for 2 of "),
]


@pytest.fixture(params=CASES, ids=["rope_theta", "activation", "norm epsilon", "tokenizer"])
def different(request: pytest.FixtureRequest, tiny_base: Path, tmp_path: Path) -> tuple[Path, str]:
    """A fine-tune that differs from ``tiny_base`` in one setting, and a pattern that names it."""
    config, change, says = request.param
    folder = fine_tune(tiny_base, tmp_path / "tuned", config)
    change(folder)
    return folder, says


def test_a_fine_tune_with_another_setting_is_not_encoded_unless_requested(
    different: tuple[Path, str], tiny_base: Path, tmp_path: Path
) -> None:
    tuned, says = different
    out = tmp_path / "new.gymdelta"
    with pytest.raises(GymError, match=says) as caught:
        Quantizer(EXACT).quantize(str(tiny_base), str(tuned), out=out, progress=False)
    assert caught.value.code is ErrorCode.BASE_MISMATCH
    assert not out.exists()
    report = Quantizer(EXACT).quantize(
        str(tiny_base), str(tuned), out=out, progress=False, allow_differences=True
    )
    assert len(report.not_in_file) == 1


def test_a_fine_tune_with_another_setting_is_in_no_soup_unless_requested(
    different: tuple[Path, str], tiny_base: Path, tmp_path: Path
) -> None:
    tuned, says = different
    soup = DeltaSoup(DeltaSoupConfig(base_model=str(tiny_base)))
    with pytest.raises(GymError, match=says):
        soup.contribute(user_id="ana", model=tuned)
    soup.contribute(user_id="ana", model=tuned, allow_differences=True)
    words = ["soup", "merge", str(tuned), "--rule", "mean", "--base", str(tiny_base), "--json"]
    words += ["-o", str(tmp_path / "soup.gymdelta")]
    result = CliRunner().invoke(app, words)
    assert isinstance(result.exception, GymError), result.output
    assert result.exception.code is ErrorCode.BASE_MISMATCH
    done = CliRunner().invoke(app, [*words, "--allow-differences"], catch_exceptions=False)
    assert list(json.loads(done.stdout)["not_merged"]) == [str(tuned)]


def test_a_chat_template_of_the_fine_tunes_own_is_reported_as_not_in_the_file(
    tiny_base: Path, tmp_path: Path
) -> None:
    tuned = fine_tune(tiny_base, tmp_path / "tuned")
    (tuned / "chat_template.jinja").write_text("{% for m in messages %}{{ m.content }}{% endfor %}")
    report = Quantizer(EXACT).quantize(
        str(tiny_base), str(tuned), out=tmp_path / "new.gymdelta", progress=False
    )
    assert report.not_in_file == ("chat template",)


def test_a_fine_tune_whose_config_names_another_dtype_and_version_is_no_other_model(
    tiny_base: Path, tmp_path: Path
) -> None:
    config = {
        "dtype": "bfloat16",
        "transformers_version": "4.1.0",
        "use_cache": False,
        "attention_dropout": 0.5,
    }
    tuned = fine_tune(tiny_base, tmp_path / "tuned", config)
    report = Quantizer(EXACT).quantize(
        str(tiny_base), str(tuned), out=tmp_path / "new.gymdelta", progress=False
    )
    assert report.not_in_file == ()


def test_window_settings_that_nothing_reads_are_no_difference() -> None:
    from transformers import Qwen2Config

    from gym_fed.base.modeling.differences import _config_differences

    def config(**changes: Any) -> Any:
        return Qwen2Config(num_hidden_layers=2, use_sliding_window=False, **changes)

    assert list(_config_differences(config(max_window_layers=24), config(max_window_layers=21))) == []
    assert list(_config_differences(config(rms_norm_eps=1e-5), config(rms_norm_eps=1e-6)))


def test_other_special_tokens_and_properties_without_added_tokens_are_reported(tiny_base: Path) -> None:
    from tokenizers import AddedToken

    from gym_fed.base.models import load_tokenizer

    base, tuned = load_tokenizer(str(tiny_base)), load_tokenizer(str(tiny_base))
    special = str(tuned.eos_token)
    tuned.add_tokens([AddedToken(special, special=True, lstrip=True)], special_tokens=True)
    tuned.bos_token = special
    base.bos_token = str(base.convert_ids_to_tokens(5))
    found = [d.what for d in require_same_settings("tuned", None, None, (base, tuned))]
    assert found == ["bos token", "properties of 1 token"]


@pytest.mark.parametrize("queries", [128, 64])
def test_a_config_whose_keys_are_numbers_is_compared(queries: int) -> None:
    from types import SimpleNamespace

    from transformers import AriaConfig

    def model(config: AriaConfig) -> Any:
        return SimpleNamespace(config=config)

    base = model(AriaConfig(projector_patch_to_query_dict={1225: 128}))
    tuned = model(AriaConfig(projector_patch_to_query_dict={1225: queries}))
    if queries == 128:
        assert require_same_settings("tuned", base, tuned) == []
    else:
        with pytest.raises(GymError, match=r"1225: 128 -> 64"):
            require_same_settings("tuned", base, tuned)
