"""The messages of an upload, in the form in which the agent sends them."""

from __future__ import annotations

from collections.abc import AsyncIterator

from gym_fed.trust.wire.limits import CHUNK_BYTES
from gym_fed.trust.wire.v1 import hub_pb2 as pb


async def chunks(sha256: str, data: bytes, offset: int) -> AsyncIterator[pb.UploadChunk]:
    """Yield the chunks of an upload from ``offset`` on."""
    for start in range(offset, max(len(data), offset + 1), CHUNK_BYTES):
        yield pb.UploadChunk(sha256=sha256, offset=start, data=data[start : start + CHUNK_BYTES])
