"""What the contract tests share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from gym_client.hub.transport import HubClient

from tests.support.loopback_hub import LoopbackHub


@pytest.fixture
def ann(hub: LoopbackHub, tmp_path: Path) -> Iterator[HubClient]:
    with hub.client(tmp_path / "ann") as client:
        yield client


@pytest.fixture
def bob(hub: LoopbackHub, tmp_path: Path) -> Iterator[HubClient]:
    with hub.client(tmp_path / "bob") as client:
        yield client
