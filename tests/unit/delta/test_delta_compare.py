"""`gym delta compare`: bits and errors of every layer, against a formula of its own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from typer.testing import CliRunner

from gym_fed.base.models import load_model
from gym_fed.cli.main import app
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.delta.base import model_tensors
from gym_fed.delta.file import DeltaFile
from tests.support.fine_tunes import save_noisy_copy

WHOLE, SIGNS = "whole.gymdelta", "signs.gymdelta"


def gym(*words: object) -> Result:
    return CliRunner().invoke(app, ["delta", *(str(word) for word in words)])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, tiny_base: Path) -> Path:
    """A base, a fine-tune, two deltas of it, and a text."""
    path = tmp_path_factory.mktemp("compare")
    save_noisy_copy(tiny_base, path / "tuned", unchanged="norm")
    (path / "text.jsonl").write_text('{"text": "to be or not to be"}\n{"text": "that is the question"}\n')
    for name, codec in ((WHOLE, "dense"), (SIGNS, "bitdelta")):
        done = gym("encode", tiny_base, path / "tuned", "-o", path / name, "--codec", codec)
        assert done.exit_code == 0, done.output
    return path


def compared(folder: Path, base: Path, *words: object) -> dict[str, Any]:
    files = [folder / WHOLE, folder / SIGNS]
    done = gym("compare", base, folder / "tuned", *files, "--json", *words)
    assert done.exit_code == 0, done.exception
    found = json.loads(done.stdout)
    return {Path(file).name: {t["name"]: t for t in report["tensors"]} for file, report in found.items()}


def test_errors_of_the_weights_are_those_of_the_formula(folder: Path, tiny_base: Path) -> None:
    found = compared(folder, tiny_base)[SIGNS]
    base, tuned = (model_tensors(load_model(str(m)).model) for m in (tiny_base, folder / "tuned"))
    with DeltaFile.open(folder / SIGNS) as delta:
        for name, tensor in found.items():
            true = tuned[name] - base[name]
            if not bool(true.any()):
                assert tensor["weight_error"] is None
                continue
            wanted = float((delta.decode(name) - true).norm() / true.norm())
            assert tensor["weight_error"] == pytest.approx(wanted, rel=1e-4)
            assert tensor["output_error"] is None


def test_errors_of_the_outputs_are_measured_on_the_text(folder: Path, tiny_base: Path) -> None:
    found = compared(folder, tiny_base, "--data", folder / "text.jsonl")
    linear = [n for n, t in found[SIGNS].items() if "proj" in n and t["codec"] == "bitdelta"]
    assert linear
    for name in linear:
        assert found[WHOLE][name]["output_error"] < 0.02
        assert 0.3 < found[SIGNS][name]["output_error"] < 1.0  # one scale for random changes loses about 60%
        assert found[SIGNS][name]["bits_per_weight"] < 2 < found[WHOLE][name]["bits_per_weight"]
    norms = [t for n, t in found[SIGNS].items() if "norm" in n]
    assert norms
    assert all(t["output_error"] is None for t in norms)


def test_the_table_and_the_plot_name_every_changed_tensor(
    folder: Path, tiny_base: Path, tmp_path: Path
) -> None:
    picture = tmp_path / "errors.svg"
    done = gym("compare", tiny_base, folder / "tuned", folder / SIGNS, "--plot", picture)
    assert done.exit_code == 0, done.exception
    assert "bits per weight" in done.output
    assert picture.read_text().lstrip().startswith("<?xml")
    assert picture.stat().st_size > 5000


def test_a_delta_of_another_base_is_refused(folder: Path) -> None:
    error = gym("compare", folder / "tuned", folder / "tuned", folder / SIGNS).exception
    assert isinstance(error, GymError)
    assert error.code is ErrorCode.BASE_MISMATCH
