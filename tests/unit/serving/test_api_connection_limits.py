"""Connection limits of `gym api`: which connection is closed, slow readers, and a clean stop."""

from __future__ import annotations

import gc
import logging
import os
import signal
import threading
from types import SimpleNamespace
from typing import Any

import pytest

from gym_fed.config.serving import ConnectionsConfig, ServingConfig
from gym_fed.serving.http.connections import Connections, _Counted
from gym_fed.serving.http.server import run_server

CONFIG = ConnectionsConfig(max_connections=10, max_per_address=4, stalled_seconds=60)


class Open:
    """A connection of an address; ``is_busy`` while it is answered."""

    def __init__(self, address: str, is_busy: bool = False) -> None:
        self.address, self.is_busy, self.has_ended = address, is_busy, False

    def end(self) -> None:
        self.has_ended = True


def added(connections: Connections, *many: Open) -> list[bool]:
    for one in many:
        connections.add(one, one.address)
    return [one.has_ended for one in many]


def test_beyond_all_the_oldest_idle_one_of_any_address_makes_room() -> None:
    connections = Connections(CONFIG)
    answered, *idle = (Open(f"10.0.0.{number}", is_busy=number == 0) for number in range(13))
    assert added(connections, answered, *idle) == [False, *[True] * 3, *[False] * 9]
    assert len(connections) == CONFIG.max_connections


def test_beyond_an_addresss_share_one_of_its_own_makes_room() -> None:
    connections = Connections(CONFIG)
    other, *many = (Open("10.0.0.1"), *(Open("10.0.0.2") for _ in range(6)))
    assert added(connections, other, *many) == [False, True, True, *[False] * 4]
    connections.remove(many[-1])
    assert added(connections, Open("10.0.0.2")) == [False], "a place that was given back is free"


def test_where_all_are_answered_the_newest_has_to_go() -> None:
    connections = Connections(CONFIG)
    assert added(connections, *(Open("10.0.0.2", is_busy=True) for _ in range(5))) == [*[False] * 4, True]


def test_who_takes_nothing_of_its_answer_is_given_up_and_who_takes_some_is_not() -> None:
    unsent = [500]
    connection: Any = SimpleNamespace(
        is_busy=True,
        cycle=SimpleNamespace(more_body=False),
        flow=SimpleNamespace(read_paused=False),
        transport=SimpleNamespace(get_write_buffer_size=lambda: unsent[0]),
        _note_phase=lambda: None,
        **{"_since": 0.0, "_moved": 0.0, "_unsent": 0, "_came": 0},
    )

    def why(now: float) -> str:
        return _Counted.too_slow(connection, now, CONFIG)

    assert (why(1.0), why(60.0), why(62.0)) == ("", "", "that did not read the answer")
    unsent[0] = 400
    assert (why(63.0), why(122.0)) == ("", ""), "it took some"
    unsent[0] = 0
    assert why(1000.0) == "", "there is nothing to take"


@pytest.mark.skipif(os.name == "nt", reason="signals of Unix")
def test_a_stop_by_a_signal_leaves_no_error_behind(caplog: pytest.LogCaptureFixture) -> None:
    config = ServingConfig(base="gym-nano", variants=None, device="cpu", num_threads=1, port=0)
    with caplog.at_level(logging.ERROR, logger="asyncio"):
        finished = run_server(config, on_ready=lambda *_: os.kill(os.getpid(), signal.SIGTERM))
        gc.collect()
    assert finished
    assert threading.current_thread() is threading.main_thread()
    assert [record for record in caplog.records if record.name == "asyncio"] == []
