"""A home folder per test, a store, and models to push to it."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from gym_fed.registry import ModelRegistry


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The home whose key signs and whose pins count."""
    monkeypatch.setenv("GYM_HOME", str(tmp_path / "home"))
    monkeypatch.delenv("GYM_MODELS", raising=False)
    return tmp_path / "home"


@pytest.fixture
def store(tmp_path: Path) -> Path:
    return tmp_path / "store"


@pytest.fixture
def registry(store: Path) -> ModelRegistry:
    return ModelRegistry(store)


@pytest.fixture
def model(tiny_base: Path, tmp_path: Path) -> Path:
    """A folder with a whole model, which a test may change."""
    return Path(shutil.copytree(tiny_base, tmp_path / "model"))


@pytest.fixture
def delta(model: Path, tmp_path: Path) -> Path:
    """A one-bit delta on ``model``."""
    import torch

    from gym_fed.base.models import load_model, model_name
    from gym_fed.delta.base import BaseSpec
    from gym_fed.delta.writer import DeltaEntry, write_delta

    loaded = load_model(str(model)).model
    spec = BaseSpec.of(loaded, model_name(str(model)))
    torch.manual_seed(1)
    entries = [
        DeltaEntry.of(name, torch.randn(shape) * 0.01, "bitdelta")
        for name, shape in spec.shapes.items()
        if len(shape) == 2
    ]
    write_delta(tmp_path / "tuned.gymdelta", entries, spec)
    return tmp_path / "tuned.gymdelta"
