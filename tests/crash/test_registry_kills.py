"""A push and a pull of the registry that are killed by SIGKILL: no half version, no half model."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from gym_fed.registry import ModelRegistry
from tests.support.quick import quick

_BEGIN = "from gym_fed.registry import ModelRegistry; import sys; registry = ModelRegistry(sys.argv[1]); "
_PUSH = _BEGIN + "registry.push('me/tiny', sys.argv[2], licence='mit', description='new')"
_PULL = _BEGIN + "registry.pull('me/tiny', sys.argv[2])"


def _killed(code: str, line: str, *words: Path) -> None:
    environment = {**os.environ, "GYM_FAILPOINTS": line, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", code, *map(str, words)], env=environment, capture_output=True
    )
    assert done.returncode == -signal.SIGKILL, done.stderr.decode()


@pytest.fixture
def store(tmp_path: Path, tiny_base: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A store with version 1."""
    monkeypatch.setenv("GYM_HOME", str(tmp_path / "home"))
    ModelRegistry(tmp_path / "store").push("me/tiny", tiny_base, licence="mit")
    return tmp_path / "store"


@pytest.mark.parametrize(
    ("line", "published"),
    quick(
        [("registry-object-put:2", 1), ("registry-before-manifest", 1), ("registry-after-manifest", 2)],
        ("registry-before-manifest", 1),
    ),
)
def test_a_push_that_is_killed_leaves_a_whole_version_or_none(
    store: Path, tiny_base: Path, tmp_path: Path, line: str, published: int
) -> None:
    _killed(_PUSH, line, store, tiny_base)
    registry = ModelRegistry(store)
    assert registry.versions("me/tiny")[-1] == published
    assert registry.verify("me/tiny")[1] == []
    again = registry.push("me/tiny", tiny_base, licence="mit", description="new")
    assert again.version == 2
    assert registry.verify("me/tiny@2")[1] == []


@pytest.mark.parametrize("line", ["registry-file-fetched:3", "registry-pull-complete"])
def test_a_pull_that_is_killed_leaves_no_model_and_goes_on(
    store: Path, tiny_base: Path, tmp_path: Path, line: str
) -> None:
    out = tmp_path / "out"
    _killed(_PULL, line, store, out)
    assert not out.exists()
    (part,) = tmp_path.glob(".out.*.pull")
    came = {path.name: path.stat().st_ino for path in part.iterdir() if not path.name.startswith(".")}
    assert len(came) >= 3
    folder = ModelRegistry(store).pull("me/tiny", out)
    assert (folder / "model.safetensors").read_bytes() == (tiny_base / "model.safetensors").read_bytes()
    assert {name: (folder / name).stat().st_ino for name in came} == came, "fetched twice"
    assert not list(tmp_path.glob(".out*"))
