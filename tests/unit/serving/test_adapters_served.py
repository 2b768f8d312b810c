"""The `--adapter` option of gym chat, api and batch: answers come from the merged weights."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from typer.testing import CliRunner

from gym_fed.base.models import load_adapted
from gym_fed.cli.main import app
from gym_fed.config.serving import ServingConfig
from gym_fed.core.errors import GymError
from gym_fed.serving.setup import open_serving
from tests.support.adapters import logits, run, sibling


def test_adapters_are_merged_into_the_base_that_is_served(tiny_base: Path, tmp_path: Path) -> None:
    run(tmp_path / "first", model=str(tiny_base))
    run(tmp_path / "second", model=str(tiny_base), adapter=str(tmp_path / "first"), new_adapter=True)
    wanted = logits(tmp_path / "second")
    assert (wanted - logits(tiny_base)).abs().max() > 1e-3
    both = [str(tmp_path / "first"), str(tmp_path / "second")]
    torch.testing.assert_close(logits(load_adapted(str(tiny_base), both).model), wanted, rtol=0, atol=2e-6)
    with open_serving(ServingConfig(base=str(tiny_base), adapter=both, device="cpu")) as serving:
        assert serving.served_name == tiny_base.name
        plain = ServingConfig(base=str(tiny_base), device="cpu")
        with open_serving(plain) as other:
            assert serving.base.digest != other.base.digest
    words = [str(tiny_base), "--adapter", both[1], "--prompt", "hello", "--max-tokens", "2", "--json"]
    result = CliRunner().invoke(app, ["chat", *words, "--device", "cpu"])
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)


def test_an_adapter_of_another_base_is_refused_before_the_model_is_loaded(
    tiny_base: Path, tmp_path: Path
) -> None:
    run(tmp_path / "first", model=str(tiny_base), max_steps=1)
    other = sibling("Llama", tmp_path / "other")
    words = ["--adapter", str(tmp_path / "first"), "--prompt", "hello"]
    result = CliRunner().invoke(app, ["chat", str(other), *words])
    assert isinstance(result.exception, GymError)
    assert "has different weights" in str(result.exception)
    result = CliRunner().invoke(app, ["chat", *words, "--api", "http://127.0.0.1:9"])
    assert "--adapter cannot be combined with --api" in str(result.exception)
