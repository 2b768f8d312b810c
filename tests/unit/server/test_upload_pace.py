"""Uploads that give nothing, or too little: each is ended, and what came is kept."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from gym_server.rpc import transfers as module
from gym_server.rpc.transfers import Transfers

from gym_fed.config.hub.sections import LimitsConfig
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.trust.wire.v1 import hub_pb2 as pb
from tests.support.loopback_hub import LoopbackHub

NAME = "a" * 64
SIZE = 1 << 10


@pytest.fixture
def transfers(tmp_path: Path) -> Iterator[Transfers]:
    hub = LoopbackHub(tmp_path / "hub")
    limits = LimitsConfig(idle_upload_seconds=1.0)
    made = Transfers(hub.fed.database, hub.fed.store, 2 << 30, limits=limits)
    made.begin("ann", NAME, SIZE)
    yield made
    hub.close()


async def _chunks(count: int, size: int, pause: float) -> AsyncIterator[pb.UploadChunk]:
    for number in range(count):
        await asyncio.sleep(pause)
        yield pb.UploadChunk(sha256=NAME, offset=number * size, data=bytes(size))


@pytest.mark.parametrize(
    ("count", "size", "pause", "message"),
    [
        (100, 1, 0.05, "arrived at less than"),
        (200, 0, 0.02, "arrived at less than"),
        (2, 10, 4.0, "the upload received no data"),
    ],
    ids=["a byte at a time", "empty chunks", "silence"],
)
def test_an_upload_that_does_not_get_on_is_ended(
    transfers: Transfers, count: int, size: int, pause: float, message: str
) -> None:
    """Each chunk comes in time, and all together would never be done."""
    with pytest.raises(GymError, match=message) as caught:
        asyncio.run(transfers.receive("ann", _chunks(count, size, pause), lambda: None))
    assert caught.value.code is ErrorCode.DEADLINE_EXCEEDED
    if size == 1:
        held = transfers.begin("ann", NAME, SIZE).offset
        assert 0 < held < count, "the next try goes on from there"


@pytest.mark.parametrize("size", [0, 1])
def test_tiny_chunks_wait_at_the_sender_and_take_no_processor(
    transfers: Transfers, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_PAUSE_SECONDS", 3600.0)
    taken: list[int] = []

    async def endless() -> AsyncIterator[pb.UploadChunk]:
        async for chunk in _chunks(500, size, 0.0):
            taken.append(len(chunk.data))
            yield chunk

    with pytest.raises(GymError, match="arrived at less than"):
        asyncio.run(transfers.receive("ann", endless(), lambda: None))
    assert len(taken) == 2
