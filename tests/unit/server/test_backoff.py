"""How long the hub waits after rounds that came to nothing: longer each time, up to a bound, then anew."""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from gym_server.strategy.backoff import RoundBackoff, paused

from tests.support.loopback_hub import LoopbackHub


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[LoopbackHub]:
    found = LoopbackHub(tmp_path / "hub", rounds={"backoff_seconds": 4, "backoff_max_seconds": 30})
    yield found
    found.close()


def grid(*nodes: int) -> Any:
    return SimpleNamespace(get_node_ids=lambda: list(nodes))


def test_waits_double_up_to_the_bound_and_begin_anew_after_a_commit(
    hub: LoopbackHub, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "gym_server")
    backoff = RoundBackoff(
        hub.fed.state,
        hub.fed.live_config,
        hub.fed.queue,
        grid(),
        should_stop=lambda: True,
    )

    def waits(count: int) -> list[int]:
        caplog.clear()
        for number in range(count):
            backoff.failed(number + 1, "nobody came")
        return [int(seconds) for seconds in re.findall(r"begins in (\d+) s", caplog.text)]

    assert waits(6) == [4, 8, 16, 30, 30, 30]
    backoff.succeeded()
    assert waits(2) == [4, 8]
    backoff._failures = 2_000
    assert waits(1) == [30], "however many nights it goes on"


def test_the_wait_is_waited_and_the_status_has_it_until_its_end(hub: LoopbackHub) -> None:
    seen: list[Any] = []

    def look() -> bool:
        seen.append(paused(hub.fed.database))
        return len(seen) == 3

    began = time.time()
    RoundBackoff(hub.fed.state, hub.fed.live_config, hub.fed.queue, grid(), look).failed(1, "nobody came")
    assert [state["failures"] for state in seen] == [1, 1, 1], "it polled, and did not return at once"
    assert began + 3 < seen[0]["until"] < time.time() + 5
    assert paused(hub.fed.database) is None


def test_a_failure_of_this_machine_is_waited_out_even_when_contributors_connect(hub: LoopbackHub) -> None:
    looks: list[int] = []

    def look() -> bool:
        looks.append(1)
        return len(looks) == 3

    RoundBackoff(
        hub.fed.state,
        hub.fed.live_config,
        hub.fed.queue,
        grid(*range(1, 9)),
        look,
    ).hold("the disk is full")
    assert len(looks) == 3
