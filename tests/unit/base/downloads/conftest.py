"""A Hub on loopback in place of the real one, with a cache of its own."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from huggingface_hub import constants

from gym_fed.base.downloads.streamed import COMMITS
from tests.support.model_hub import ModelHub, Repo

NAME = "acme/tiny-chat"


@pytest.fixture(autouse=True)
def online(monkeypatch: pytest.MonkeyPatch) -> None:
    """Loopback servers are reached where the environment forbids the network, too; this machine's token stays here."""
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    for name in ("HF_TOKEN", "HF_HUB_OFFLINE"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def hub(tiny_base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModelHub]:
    """Serves ``acme/tiny-chat``: a real model of some hundred kilobytes, beside what no one should fetch."""
    repo = Repo.of(tiny_base, card={"license": "apache-2.0"})
    for unwanted in ("pytorch_model.bin", "modeling_tiny.py", "original/consolidated.00.pth", "model.gguf"):
        repo.files[unwanted] = b"x" * 100
    with ModelHub({NAME: repo}) as served:
        served.stand_in(monkeypatch, tmp_path / "cache")
        monkeypatch.setenv(COMMITS, "{}")
        yield served


@pytest.fixture
def repo(hub: ModelHub) -> Repo:
    """The one repository of ``hub``."""
    return hub.repos[NAME]
