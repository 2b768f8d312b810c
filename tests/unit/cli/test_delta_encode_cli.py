"""`gym delta encode`: BitDelta and DeltaQuant from the command line, and what it refuses."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import Result
from peft import LoraConfig, get_peft_model
from typer.testing import CliRunner

from gym_fed.base.models import load_model
from gym_fed.cli.main import app
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.delta.base import BaseSpec, model_tensors
from gym_fed.delta.file import DeltaFile
from tests.support.fine_tunes import save_noisy_copy

FEW = ("--set", "distill_steps=3", "--set", "distill_batch=1", "--set", "max_length=32")


def gym(*words: object) -> Result:
    return CliRunner().invoke(app, ["delta", *(str(word) for word in words)])


@pytest.fixture(scope="module")
def tuned(tmp_path_factory: pytest.TempPathFactory, tiny_base: Path) -> Path:
    """A fine-tune of the tiny base, with a text beside it."""
    path = tmp_path_factory.mktemp("encode")
    save_noisy_copy(tiny_base, path)
    (path / "text.jsonl").write_text('{"text": "to be or not to be, that is the question"}\n' * 8)
    return path


def test_bitdelta_is_distilled_on_the_text_and_shown_layer_by_layer(
    tiny_base: Path, tuned: Path, tmp_path: Path
) -> None:
    out, picture = tmp_path / "d.gymdelta", tmp_path / "d.svg"
    words = ("--codec", "bitdelta", "--data", tuned / "text.jsonl", "--plot", picture, *FEW)
    done = gym("encode", tiny_base, tuned, "-o", out, *words)
    assert done.exit_code == 0, done.exception
    assert "distilled" in done.output
    assert "; --codec compact keeps 99%, in a larger file" in done.output
    assert re.search(r"(keeps .*|no gain to keep) on --data: loss \d\.\d{4} -> ", done.output)
    assert "safety projection: not applicable" in done.output
    assert picture.stat().st_size > 5000
    with DeltaFile.open(out, BaseSpec.of(load_model(str(tiny_base)).model, "tiny")) as delta:
        assert {delta.record(name).codec for name in delta.names} == {"bitdelta", "dense"}


@pytest.mark.parametrize("settings", [(), ("--set", "max_error=0.1"), ("--set", "max_error=0.001")])
def test_a_fine_tune_keeps_99_percent_unless_another_bound_is_named(
    tiny_base: Path, tuned: Path, tmp_path: Path, settings: tuple[str, ...]
) -> None:
    out = tmp_path / "d.gymdelta"
    done = gym("encode", tiny_base, tuned, "-o", out, "--json", *settings)
    assert done.exit_code == 0, done.exception
    report = json.loads(done.stdout)
    bound = float(settings[1].partition("=")[2]) if settings else 0.01
    old, new = (model_tensors(load_model(str(folder)).model) for folder in (tiny_base, tuned))
    lost = whole = 0.0
    with DeltaFile.open(out) as delta:
        for name in old:
            change = new[name] - old[name]
            error = (delta.decode(name) - change).square().sum()
            assert error <= bound**2 * change.square().sum(), name
            lost, whole = lost + float(error), whole + float(change.square().sum())
    assert report["kept"] == pytest.approx(1 - (lost / whole) ** 0.5, abs=1e-4)
    exact = 4 * sum(tensor.numel() for tensor in old.values())
    most = {0.1: 0.25, 0.01: 0.4, 0.001: 0.75}[bound]  # a third of the smallest is its header
    assert report["size_bytes"] < most * exact


def test_a_lora_run_keeps_its_factors_unless_another_codec_is_named(tiny_base: Path, tmp_path: Path) -> None:
    loaded = load_model(str(tiny_base))
    tuned: Any = get_peft_model(loaded.model, LoraConfig(r=2, target_modules="all-linear"))
    with torch.no_grad():
        for name, tensor in tuned.named_parameters():
            if "lora_B" in name:
                tensor.normal_(std=1e-2)
    tuned.save_pretrained(tmp_path / "run")
    loaded.tokenizer.save_pretrained(tmp_path / "run")
    kept = {}
    for codec in ("compact", "lora", "bitdelta"):
        named = () if codec == "compact" else ("--codec", codec)
        done = gym("encode", tiny_base, tmp_path / "run", "-o", tmp_path / f"{codec}.gymdelta", *named)
        assert done.exit_code == 0, done.exception
        (percent,) = re.findall(r"keeps ([\d.]+)% of the delta", done.output)
        kept[codec] = float(percent)
    assert min(kept["compact"], kept["lora"]) > 99
    assert (tmp_path / "compact.gymdelta").read_bytes() == (tmp_path / "lora.gymdelta").read_bytes()
    assert kept["bitdelta"] < 50


@pytest.mark.parametrize("method", ["int8", "int4", "int2", "ternary", "binary"])
def test_every_method_of_deltaquant_writes_its_codec(
    tiny_base: Path, tuned: Path, tmp_path: Path, method: str
) -> None:
    out = tmp_path / "d.gymdelta"
    done = gym("encode", tiny_base, tuned, "-o", out, "--codec", method, "--json")
    assert done.exit_code == 0, done.exception
    report = json.loads(done.stdout)
    assert method in {t["codec"] for t in report["tensors"]}
    assert report["size_bytes"] == out.stat().st_size
    assert report["distillation"] is None


def test_wrong_words_are_refused_before_anything_is_written(
    tiny_base: Path, tuned: Path, tmp_path: Path
) -> None:
    out = tmp_path / "d.gymdelta"
    for words, code, message in (
        (("--set", "grup_size=3"), ErrorCode.CONFIG_INVALID, "did you mean 'group_size'"),
        (("--set", "a.b=3"), ErrorCode.USAGE, "a.b"),
        (("--set", "distill_steps=5"), ErrorCode.CONFIG_INVALID, "distill_steps"),
        (("--set", "safety_threshold=0.5"), ErrorCode.CONFIG_INVALID, "aligned"),
    ):
        error = gym("encode", tiny_base, tuned, "-o", out, *words).exception
        assert isinstance(error, GymError), words
        assert error.code is code
        assert message in str(error)
        assert not out.exists()
    out.write_bytes(b"mine")
    error = gym("encode", tiny_base, tuned, "-o", out).exception
    assert isinstance(error, GymError)
    assert error.code is ErrorCode.FILE_EXISTS
    assert out.read_bytes() == b"mine"
