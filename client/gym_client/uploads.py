"""Upload of one object: declared first, then sent in chunks from where the hub stands."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

from gym_client.transport import HubClient, transfer_seconds
from gym_fed.errors import ErrorCode, GymError
from gym_fed.wire.limits import CHUNK_BYTES
from gym_fed.wire.v1 import hub_pb2 as pb

CALL_BYTES = 64 * CHUNK_BYTES
"""What one call carries at most, so that its deadline stays short; the next call goes on from there."""

Progress = Callable[[int, int], None]
"""Bytes done, bytes in all."""


def upload(
    client: HubClient,
    sha256: str,
    path: Path,
    progress: Progress | None = None,
    should_stop: Callable[[], bool] = lambda: False,
    count: Callable[[int], None] = lambda num_bytes: None,
) -> None:
    """Bring a file to the hub. To resume, call it again.

    Args:
        client: The hub.
        sha256: Hex digest of the file, its name over there.
        path: The file.
        progress: Told after each chunk that was handed to the network.
        should_stop: Asked between chunks; True ends the upload where it is.
        count: Called with the bytes of each chunk that was handed to the network.

    Raises:
        GymError: ``INTERRUPTED``; ``UNAVAILABLE`` when the line broke; refusals of the hub.
    """
    size = path.stat().st_size
    tell = progress or (lambda done, total: None)
    state = client.call("BeginUpload", pb.BeginUploadRequest(sha256=sha256, size_bytes=size))
    while not state.complete:
        offset = _checked(state.offset, size, client)
        tell(offset, size)
        span = min(CALL_BYTES, size - offset)

        def chunks(offset: int = offset, span: int = span) -> Iterator[pb.UploadChunk]:
            return _chunks(sha256, path, offset, span, lambda done: tell(done, size), should_stop, count)

        if should_stop():
            raise GymError(ErrorCode.INTERRUPTED, f"the upload stopped at byte {offset} of {size}")
        state = client.call("Upload", chunks, transfer_seconds(span))
        if not state.complete and state.offset <= offset:
            raise GymError(
                ErrorCode.INTERNAL,
                f"{client.address} took none of {span} bytes of object {sha256} at {offset}",
            )
    tell(size, size)


def _checked(offset: int, size: int, client: HubClient) -> int:
    if offset >= size:
        raise GymError(
            ErrorCode.INTERNAL, f"{client.address} wants byte {offset} of an object of {size} bytes"
        )
    return offset


def _chunks(
    sha256: str,
    path: Path,
    offset: int,
    span: int,
    tell: Callable[[int], None],
    should_stop: Callable[[], bool],
    count: Callable[[int], None],
) -> Iterator[pb.UploadChunk]:
    with path.open("rb") as file:
        file.seek(offset)
        end, name = offset + span, sha256
        while offset < end:
            data = file.read(min(CHUNK_BYTES, end - offset))
            if not data:
                return  # the file shrank; the hub's sha256 check refuses the object
            yield pb.UploadChunk(sha256=name, offset=offset, data=data)
            offset, name = offset + len(data), ""
            tell(offset)
            count(len(data))
            if should_stop():
                return
