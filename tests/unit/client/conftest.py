"""A home, a tiny hub, and a scene of one hub and one agent, for each test that takes them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from gym_client.identity.home import Home

from tests.support.agent_scene import Scene
from tests.support.tiny_hub import TinyHub


@pytest.fixture
def home(tmp_path: Path) -> Home:
    return Home.open(tmp_path / "home")


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[TinyHub]:
    hub = TinyHub(tmp_path / "hub").start()
    yield hub
    hub.stop()


@pytest.fixture
def scene(tmp_path: Path) -> Iterator[Scene]:
    with closing(Scene(tmp_path)) as scene:
        yield scene
