"""Small models and their GGUF files."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.gguf_files import write_gguf
from tests.support.siblings import make_sibling


@pytest.fixture(scope="module", params=["llama3", "qwen3"])
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model folder of each family whose layout differs in GGUF."""
    return make_sibling(request.param, tmp_path_factory.mktemp("family") / request.param)


@pytest.fixture(scope="module")
def qwen3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model folder."""
    return make_sibling("qwen3", tmp_path_factory.mktemp("model") / "qwen3")


@pytest.fixture(scope="module")
def qwen3_file(qwen3: Path) -> Path:
    """It in a GGUF file of float32."""
    return write_gguf(qwen3, qwen3.parent / "small.gguf")


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home of this test's own."""
    monkeypatch.setenv("GYM_HOME", str(tmp_path / "home"))
    return tmp_path / "home"
