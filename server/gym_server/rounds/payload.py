"""Delta files in Flower messages: references on the hub, inline bytes on a stock SuperLink."""

from __future__ import annotations

import hashlib
from typing import Protocol

from flwr.app import Array

from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.core.text import counted
from gym_fed.trust.wire.limits import DELTA_STYPE
from gym_fed.trust.wire.records import reference
from gym_server.store.objects import ObjectStore


class Payloads(Protocol):
    """Converts stored objects to arrays of a message, and arrays of a reply to stored objects."""

    by_reference: bool
    """True if contributors connect to the hub itself, where they enrol and upload files."""

    def outgoing(self, sha256: str, size_bytes: int) -> Array: ...

    def incoming(self, sha256: str, array: Array) -> None: ...


class ByReference:
    """Payloads on the hub: bytes are uploaded separately, and messages contain only references."""

    by_reference = True

    def outgoing(self, sha256: str, size_bytes: int) -> Array:
        return reference(sha256, size_bytes)

    def incoming(self, sha256: str, array: Array) -> None:
        """Do nothing: admission finds the object, or reports that it is missing."""


class Inline:
    """Payloads on a stock Flower deployment: the array contains the bytes."""

    by_reference = False

    def __init__(self, store: ObjectStore, max_bytes: int) -> None:
        self._store = store
        self._max_bytes = max_bytes

    def outgoing(self, sha256: str, size_bytes: int) -> Array:
        data = self._store.local_path(sha256).read_bytes()
        return Array(dtype="uint8", shape=(size_bytes,), stype=DELTA_STYPE, data=data)

    def incoming(self, sha256: str, array: Array) -> None:
        """Store the reply's bytes.

        Raises:
            GymError: ``TOO_LARGE`` above the size limit; ``HASH_MISMATCH`` if the name is not the sha256 of the bytes.
        """
        if len(array.data) > self._max_bytes:
            raise GymError(
                ErrorCode.TOO_LARGE,
                f"the delta has {counted(len(array.data), 'byte')}; the limit is {self._max_bytes}",
            )
        found = hashlib.sha256(array.data).hexdigest()
        if found != sha256:
            raise GymError(ErrorCode.HASH_MISMATCH, f"the delta's bytes hash to {found}, not to {sha256}")
        self._store.put_bytes(array.data)
