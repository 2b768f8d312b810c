"""What a download reads on the hub: the object from an offset on, a chunk ahead of what is sent."""

from __future__ import annotations

import asyncio
import secrets
from pathlib import Path

import pytest
from gym_server.rpc import transfers

from gym_fed.trust.wire.limits import CHUNK_BYTES


@pytest.mark.parametrize("offset", [0, 5, 2 * CHUNK_BYTES, 2 * CHUNK_BYTES + 300])
def test_an_object_is_read_whole_from_its_offset_in_chunks(tmp_path: Path, offset: int) -> None:
    data = secrets.token_bytes(2 * CHUNK_BYTES + 300)
    (tmp_path / "object").write_bytes(data)

    async def read() -> list[bytes]:
        return [chunk async for chunk in transfers.read_ahead(tmp_path / "object", offset)]

    found = asyncio.run(read())
    assert b"".join(found) == data[offset:]
    assert all(len(chunk) <= CHUNK_BYTES for chunk in found)


def test_one_chunk_is_read_while_another_is_sent_and_no_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "object").write_bytes(bytes(5 * CHUNK_BYTES))
    read_at, offsets = transfers._read_at, []

    def noted(path: Path, offset: int) -> bytes:
        offsets.append(offset)
        return read_at(path, offset)

    monkeypatch.setattr(transfers, "_read_at", noted)

    async def send() -> None:
        chunks = transfers.read_ahead(tmp_path / "object", 0)
        await anext(chunks)
        for _ in range(200):
            await asyncio.sleep(0.01)
            if len(offsets) == 2:
                break
        await asyncio.sleep(0.05)
        assert offsets == [0, CHUNK_BYTES]
        await chunks.aclose()

    asyncio.run(send())
