"""What a hub says its base is made of: files, and digests of tensors. And which of them a model here differs in."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from gym_client.hub.transport import HubClient
from gym_fed.base.files import (
    MAX_FILES,
    MAX_TENSORS,
    BaseFile,
    check_listing,
    listing_sha256,
    most_bytes,
)
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.core.files import file_sha256
from gym_fed.core.text import plain, readable_bytes
from gym_fed.trust.wire.limits import CALL_SECONDS
from gym_fed.trust.wire.v1 import hub_pb2 as pb

_DIGEST_BYTES = 16
_MAX_BYTES = 64 << 20
"""Of a whole listing; one of 20,000 tensors takes about 2 MB."""


@dataclass(frozen=True)
class Listing:
    """Files by which the base travels, none where the hub serves none; sixteen bytes a tensor, none where unknown."""

    files: tuple[BaseFile, ...]
    tensors: Mapping[str, bytes]

    def require(self, sha256: str, size_bytes: int) -> None:
        """Whether these files are those that were offered, and may travel.

        Raises:
            GymError: ``HASH_MISMATCH`` for another list, ``MODEL_INVALID`` as ``check_listing``.
        """
        check_listing(self.files, "the hub")
        total = sum(file.size_bytes for file in self.files)
        if listing_sha256(self.files) != sha256 or total != size_bytes:
            raise GymError(
                ErrorCode.HASH_MISMATCH,
                f"the hub now lists other files of its base ({total} bytes) than it offered ({size_bytes} bytes)",
                "join again to see the new offer",
            )


def read_listing(client: HubClient) -> Listing:
    """Ask a hub for the listing of its base.

    Raises:
        GymError: ``TOO_LARGE`` for more than any base has, ``UNAVAILABLE`` when the line broke.
    """
    files: list[BaseFile] = []
    tensors: dict[str, bytes] = {}
    num_bytes = 0
    call = client.stream("Base", pb.BaseRequest(), CALL_SECONDS)
    try:
        with client.errors():
            for part in call:
                num_bytes += part.ByteSize()
                files += [BaseFile(file.name, file.size_bytes, file.sha256) for file in part.files]
                tensors |= {tensor.name: tensor.digest[:_DIGEST_BYTES] for tensor in part.tensors}
                if len(files) > MAX_FILES or len(tensors) > MAX_TENSORS or num_bytes > _MAX_BYTES:
                    raise GymError(
                        ErrorCode.TOO_LARGE,
                        f"{client.address} lists more of its base than {MAX_FILES} files, {MAX_TENSORS} tensors or "
                        f"{readable_bytes(_MAX_BYTES)}",
                    )
    finally:
        call.cancel()
    return Listing(tuple(files), tensors)


def differences(listing: Listing, tensors: Mapping[str, bytes], folder: Path | None) -> str:
    """What of a model here is not as the hub has it, in words; empty where nothing can be said.

    Args:
        listing: The hub's.
        tensors: Of the model here, from ``digests_by_tensor``.
        folder: Its files; None where they are not known.
    """
    if listing.tensors:
        theirs, names = listing.tensors, sorted(listing.tensors.keys() | tensors.keys())
        unlike = [name for name in names if theirs.get(name) != tensors.get(name)]
        return _in_words(unlike, len(names), theirs, tensors) if unlike else ""
    for file in listing.files if folder is not None else ():
        if not most_bytes(file.name) or not file.name.endswith(".safetensors"):
            continue
        path = Path(folder or "") / file.name
        if not path.is_file() or path.stat().st_size != file.size_bytes or file_sha256(path) != file.sha256:
            return f"{path} is missing, or another file than the hub's"
    return ""


def _in_words(unlike: list[str], count: int, theirs: Mapping[str, bytes], ours: Mapping[str, bytes]) -> str:
    first = unlike[0]
    how = "has other values, dtype or shape"
    if first not in ours:
        how = "is not in the model here"
    elif first not in theirs:
        how = "is not in the hub's base"
    more = f"; {len(unlike)} of {count} tensors are unlike" if len(unlike) > 1 else ""
    return f"tensor {plain(first, 140)!r} {how}{more}"
