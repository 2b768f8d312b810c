"""The messages of an upload and of a reply, as the agent sends them."""

from __future__ import annotations

from collections.abc import AsyncIterator

from gym_fed.trust.identity.manifest import UpdateManifest
from gym_fed.trust.wire.limits import CHUNK_BYTES, DELTA_STYPE
from gym_fed.trust.wire.v1 import hub_pb2 as pb


def update_records(manifest: UpdateManifest, signature: bytes, public_key: bytes) -> pb.Records:
    """Return a reply's records, as the agent sends them."""
    records = pb.Records(order=["update", "delta"])
    for key, value in (
        ("manifest", pb.Value(text=manifest.model_dump_json())),
        ("signature", pb.Value(blob=signature)),
        ("public_key", pb.Value(blob=public_key)),
    ):
        records.configs["update"].entries.append(pb.Entry(key=key, value=value))
    records.arrays["delta"].arrays.append(
        pb.ArrayRef(
            name=manifest.delta_sha256,
            dtype="uint8",
            shape=[manifest.delta_bytes],
            stype=DELTA_STYPE,
            sha256=manifest.delta_sha256,
            size_bytes=manifest.delta_bytes,
        )
    )
    return records


async def chunks(sha256: str, data: bytes, offset: int) -> AsyncIterator[pb.UploadChunk]:
    """Yield the rest of an upload."""
    for start in range(offset, max(len(data), offset + 1), CHUNK_BYTES):
        yield pb.UploadChunk(sha256=sha256, offset=start, data=data[start : start + CHUNK_BYTES])
