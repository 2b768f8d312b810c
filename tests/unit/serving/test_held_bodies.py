"""Slow concurrent bodies: each caller holds a bounded part of the memory."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.serving.http.app import create_app
from gym_fed.serving.http.gateway import (
    MAX_BYTES_PER_CALLER,
    MAX_HELD_BYTES,
    MIN_BYTES_PER_CALLER,
    Gateway,
    HeldBodies,
)
from gym_fed.serving.http.keys import Authenticator


def test_a_caller_holds_a_bounded_part() -> None:
    bodies = HeldBodies()
    first = bodies.hold("ann")
    first.add(MAX_BYTES_PER_CALLER)
    second = bodies.hold("ann")
    with pytest.raises(GymError) as caught:
        second.add(1)
    assert caught.value.code is ErrorCode.BUSY
    assert caught.value.hint
    second.end()
    bodies.hold("ben").add(MIN_BYTES_PER_CALLER)
    first.end()
    bodies.hold("ann").add(MAX_BYTES_PER_CALLER)


def test_many_callers_share_what_there_is() -> None:
    bodies = HeldBodies()
    for number in range(40):
        held = bodies.hold(f"greedy {number}")
        try:
            while True:
                held.add(1 << 20)
        except GymError:
            pass
        bodies.hold(f"honest {number}").add(1 << 20)
    assert len(bodies) <= 3 * MAX_HELD_BYTES


def test_a_body_that_is_over_holds_nothing() -> None:
    bodies = HeldBodies()
    held = bodies.hold("ann")
    held.add(5)
    for _ in range(2):
        held.end()
        assert len(bodies) == 0
        assert not bodies._bytes


class Nothing:
    """In the place of what answers."""

    def __getattr__(self, name: str) -> Any:
        return Nothing()

    def __call__(self, *_given: Any) -> int:
        return 0


@pytest.mark.parametrize("then", ["http.disconnect", "http.request"])
def test_a_request_that_ends_in_any_way_gives_its_bytes_back(
    monkeypatch: pytest.MonkeyPatch, then: str
) -> None:
    """A client that leaves, and a body that is no JSON; meanwhile what has come is counted."""
    gateway = Gateway(Authenticator(None), request_timeout_seconds=5)
    gateway.serving = Nothing()  # type: ignore[assignment]
    counted: list[int] = []

    async def run() -> None:
        parts = [
            {"type": "http.request", "body": b"x" * 1000, "more_body": True},
            {"type": then, "body": b"x" * 1000, "more_body": False},
        ]

        async def receive() -> Any:
            counted.append(len(gateway.bodies))
            return parts.pop(0)

        async def send(_message: Any) -> None:
            return None

        headers = [(b"content-type", b"application/json"), (b"host", b"127.0.0.1")]
        scope = {"type": "http", "method": "POST", "path": "/tokenize", "raw_path": b"/tokenize"}
        await create_app(gateway)(
            {**scope, "query_string": b"", "headers": headers, "http_version": "1.1"}, receive, send
        )

    asyncio.run(run())
    assert counted == [0, 1000]
    assert len(gateway.bodies) == 0
