"""Download public objects and the ledger from the mirrors that a hub announces; the hub serves the rest.

A mirror is not trusted: its key must be the one that the hub has signed, every byte is verified, and time and size are
bounded. A mirror that fails is not tried again for some minutes, and its messages are never attributed to the hub.
"""

from __future__ import annotations

import logging
import os
import random
import secrets
import socket
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc

from gym_client.hub.replies import read_entry
from gym_client.hub.transport import HubClient
from gym_client.identity.address import Address
from gym_client.identity.proxy import proxy_for
from gym_client.identity.trust import fetch_certificate
from gym_client.seeding.fetch import (
    GRACE_SECONDS,
    FetchLimits,
    FetchTarget,
    begin_channel,
    fetch_bounded,
    time_limit,
)
from gym_fed.config.hub.mirrors import MirrorConfig
from gym_fed.core.addresses import may_connect
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.core.text import counted, plain, readable_bytes
from gym_fed.trust.identity.login import login_claim
from gym_fed.trust.identity.tls import fingerprint
from gym_fed.trust.ledger.entries import Entry
from gym_fed.trust.wire.limits import PROTOCOL, SESSION_KEY
from gym_fed.trust.wire.service import HubStub
from gym_fed.trust.wire.v1 import hub_pb2 as pb

log = logging.getLogger("gym_client")

_AVOID_SECONDS = 600.0
"""Seconds before a mirror that failed is tried again."""
_REFUSED_SECONDS = 15.0
"""Seconds before a mirror that refused the request is tried again; it may not know this account yet."""
_MAX_TRIED = 2
"""Maximum number of mirrors that are tried for an object before it is fetched from the hub."""
_LOGIN_SECONDS = 10.0
_SESSION_SECONDS = 1800.0
"""Seconds for which a session is used; a mirror keeps a session longer than this."""
_LEAST_BYTES = 256 << 10
"""Size below which objects are fetched from the hub, since a login at a mirror would take longer."""
_LEAST_ENTRIES, _MOST_ENTRIES = 500, 100_000
_MOST_ENTRY_BYTES = 64 << 20
_ENTRIES_SECONDS = 60.0


@dataclass
class _Mirror:
    """The state of a mirror."""

    config: MirrorConfig
    avoid_until: float = 0.0
    session: str = ""
    session_until: float = 0.0
    lock: threading.Lock = field(default_factory=threading.Lock)


class Mirrors:
    """The mirrors of one hub. Thread-safe.

    Args:
        client: Client of the hub; its account must be enrolled there before anything is fetched.
        mirrors: The hub's verified list of mirrors.
        grace_seconds: See ``fetch_from``.
        clock: Returns monotonic time in seconds.
    """

    def __init__(
        self,
        client: HubClient,
        mirrors: Sequence[MirrorConfig],
        grace_seconds: float = GRACE_SECONDS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._client, self._grace_seconds, self._clock = client, grace_seconds, clock
        self._mirrors = [_Mirror(config) for config in mirrors]
        self._direct = proxy_for(client.address) is None and bool(client.pin.fingerprint)

    @property
    def addresses(self) -> list[str]:
        """The addresses of the mirrors, sorted."""
        return sorted(mirror.config.address for mirror in self._mirrors)

    def fetch(
        self,
        part: Path,
        sha256: str,
        size_bytes: int,
        report: Callable[[int, int], None],
        should_stop: Callable[[], bool],
    ) -> bool:
        """Fetch an object from a mirror. Return False if it must be fetched from the hub.

        Args:
            part: File to write; deleted on failure.
            sha256: Digest of the object.
            size_bytes: Size of the object.
            report: Called with completed and total bytes.
            should_stop: Checked between chunks.

        Raises:
            GymError: ``INTERRUPTED`` after ``should_stop``, or ``DISK_FULL``. A failure of a mirror is not raised.
        """
        if size_bytes < _LEAST_BYTES:
            return False
        left = time_limit(self._client, size_bytes, self._grace_seconds)
        unverified = part.with_suffix(".seed")  # the hub's download must not resume unverified bytes
        for mirror in self._candidates():
            begun, done = self._clock(), 0

            def on_bytes(num_bytes: int) -> None:
                nonlocal done
                done += num_bytes
                report(done, size_bytes)

            limits = FetchLimits(self._client.rates.down, on_bytes, should_stop, self._grace_seconds, left)

            def begin(channel: grpc.Channel, mirror: _Mirror = mirror) -> Any:
                metadata = self._metadata(mirror, channel)
                return HubStub(channel).Download(pb.DownloadRequest(sha256=sha256), metadata=metadata)

            try:
                fetch_bounded(self._target(mirror), begin, sha256, size_bytes, unverified, limits)
            except GymError as error:
                if should_stop() or error.code is ErrorCode.DISK_FULL:
                    raise
                self._failed(mirror, error)
                report(0, size_bytes)
                left -= self._clock() - begun
                if left <= 0:
                    return False
                continue
            os.replace(unverified, part)
            log.info("%s came from the mirror %s", readable_bytes(size_bytes), mirror.config.address)
            return True
        return False

    def entries(self, first: int, last: int, last_hash: str) -> list[Entry] | None:
        """Fetch ledger entries from a mirror. Return None if they must be fetched from the hub.

        Args:
            first: Sequence number of the first entry.
            last: Sequence number of the last entry.
            last_hash: Hash of the last entry under the hub's signed head; the chain of hashes must end there.
        """
        if not _LEAST_ENTRIES <= last - first + 1 <= _MOST_ENTRIES:
            return None
        for mirror in self._candidates():
            try:
                found = self._entries_of(mirror, first, last)
                _require_chain(found, first, last, last_hash)
            except GymError as error:
                self._failed(mirror, error)
                continue
            log.info("%s came from the mirror %s", counted(len(found), "entry"), mirror.config.address)
            return found
        return None

    def _entries_of(self, mirror: _Mirror, first: int, last: int) -> list[Entry]:
        found, size = list[Entry](), 0
        with begin_channel(self._target(mirror)) as channel:
            metadata = self._metadata(mirror, channel)
            request = pb.LedgerRequest(from_sequence=first)
            call = HubStub(channel).Ledger(request, metadata=metadata, timeout=_ENTRIES_SECONDS)
            try:
                for message in call:
                    size += message.ByteSize()
                    if size > _MOST_ENTRY_BYTES:
                        raise GymError(ErrorCode.TOO_LARGE, "the mirror sends too many bytes")
                    found.append(read_entry(message))
                    if len(found) > last - first:
                        break
            except grpc.RpcError as error:
                raise _call_failed(error) from error
            finally:
                call.cancel()
        return found

    def _candidates(self) -> list[_Mirror]:
        """Return the mirrors to try, in an order that distributes the load."""
        now = self._clock()
        if not (self._direct and self._client.pin.contributor):
            return []
        usable = [mirror for mirror in self._mirrors if mirror.avoid_until <= now]
        return random.sample(usable, min(len(usable), _MAX_TRIED))

    def _target(self, mirror: _Mirror) -> FetchTarget:
        """Resolve the address of a mirror, and check that its key is the one that the hub has signed.

        Raises:
            GymError: ``UNAVAILABLE``; ``SERVER_KEY_CHANGED``; ``POLICY_REFUSED`` for an address to which a hub must not
                direct this machine.
        """
        host, _, port = mirror.config.address.rpartition(":")
        try:
            found = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_STREAM)
        except (OSError, UnicodeError) as error:  # UnicodeError: a label that no host name can have
            raise GymError(ErrorCode.UNAVAILABLE, f"{host} cannot be resolved: {error}") from error
        ips = [str(entry[4][0]) for entry in found]
        ip = next((ip for ip in ips if may_connect(ip, self._client.address.host)), None)
        if ip is None:
            raise GymError(
                ErrorCode.POLICY_REFUSED, f"the hub lists a mirror at {host}, an address that is not allowed"
            )
        pem = fetch_certificate(Address(ip, int(port)))
        if (presented := fingerprint(pem)) != mirror.config.fingerprint:
            problem = f"the mirror {host} has the key {presented}, not the one that the hub signed"
            raise GymError(ErrorCode.SERVER_KEY_CHANGED, problem)
        return FetchTarget(ip, int(port), pem.decode("ascii"), "the mirror")

    def _metadata(self, mirror: _Mirror, channel: grpc.Channel) -> tuple[tuple[str, str], ...]:
        """Return the call metadata with a session; log in first if necessary."""
        with mirror.lock:
            if not mirror.session or mirror.session_until < self._clock():
                try:
                    reply = HubStub(channel).Authenticate(self._login(mirror), timeout=_LOGIN_SECONDS)
                except grpc.RpcError as error:
                    raise _call_failed(error) from error
                mirror.session, mirror.session_until = reply.session, self._clock() + _SESSION_SECONDS
            return ((SESSION_KEY, mirror.session),)

    def _login(self, mirror: _Mirror) -> pb.AuthenticateRequest:
        """Create a login that contains the mirror's key, so that the mirror cannot relay it to the hub."""
        pin, instance, nonce = self._client.pin, self._client.home.instance, secrets.token_hex(16)
        at = int(self._client.now())
        claim = login_claim(pin.contributor, instance, at, nonce, pin.server, mirror.config.fingerprint)
        return pb.AuthenticateRequest(
            contributor=pin.contributor,
            instance=instance,
            issued_at_seconds=at,
            nonce=nonce,
            signature=self._client.sign(claim),
            protocol=PROTOCOL,
        )

    def _failed(self, mirror: _Mirror, error: GymError) -> None:
        refused = error.code in (ErrorCode.UNAUTHENTICATED, ErrorCode.BUSY)
        seconds = _REFUSED_SECONDS if refused else _AVOID_SECONDS
        mirror.avoid_until, mirror.session = self._clock() + seconds, ""
        log.info("the mirror %s is not used for %.0f s: %s", mirror.config.address, seconds, error)


def _require_chain(entries: Sequence[Entry], first: int, last: int, last_hash: str) -> None:
    """Raise an error unless the hash chain of the entries ends at the hash that the hub has signed."""
    if len(entries) != last - first + 1:
        problem = f"the mirror sent {counted(len(entries), 'entry')} instead of {last - first + 1}"
        raise GymError(ErrorCode.SIGNATURE_INVALID, problem)
    before: Entry | None = None
    for sequence, entry in enumerate(entries, first):
        entry.check_hash()
        if entry.sequence != sequence or (before is not None and entry.previous_hash != before.hash):
            raise GymError(ErrorCode.SIGNATURE_INVALID, f"the mirror sent a wrong entry {sequence}")
        before = entry
    if before is None or before.hash != last_hash:
        raise GymError(ErrorCode.SIGNATURE_INVALID, f"the mirror's entry {last} is not the hub's")


def _call_failed(error: grpc.RpcError) -> GymError:
    is_unknown = error.code() is grpc.StatusCode.UNAUTHENTICATED
    code = ErrorCode.UNAUTHENTICATED if is_unknown else ErrorCode.UNAVAILABLE
    return GymError(code, f"the request to the mirror failed: {plain(str(error.details()), 200)}")
