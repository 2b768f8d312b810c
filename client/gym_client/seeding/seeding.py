"""Seeding during one run of ``join``: fetch public objects from other contributors, announce and serve own ones."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from gym_client.display import Display
from gym_client.hub.transport import HubClient
from gym_client.identity.proxy import proxy_for
from gym_client.seeding.fetch import GRACE_SECONDS, fetch_from, require_seeder, time_limit
from gym_client.seeding.policy import TOO_SLOW, Kind, SeedingPolicy
from gym_client.seeding.server import SeederServer
from gym_client.seeding.store import SeedingTotals, SeedStore, seeds_folder
from gym_fed.base.files import BaseFile
from gym_fed.config.hub.seeding import SeedingTerms
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.core.files import file_sha256
from gym_fed.core.text import readable_bytes
from gym_fed.trust.identity.ticket import SeedTicket
from gym_fed.trust.identity.tls import fingerprint
from gym_fed.trust.wire.v1 import hub_pb2 as pb

log = logging.getLogger("gym_client")

_SEEDER_ERRORS = {
    ErrorCode.BUSY,
    ErrorCode.DEADLINE_EXCEEDED,
    ErrorCode.HASH_MISMATCH,
    ErrorCode.INTERRUPTED,
    ErrorCode.POLICY_REFUSED,
    ErrorCode.STATE_CORRUPT,
    ErrorCode.TOO_LARGE,
    ErrorCode.UNAVAILABLE,
}
"""Errors after which the next seeder is tried: errors of ``fetch_from``, refused addresses, malformed certificates."""
_MAX_FAILED = 4
"""Maximum number of failed seeders before the object is fetched from the hub."""
_MAX_WAIT_SECONDS = 3600.0
"""Maximum seconds that this machine waits when the hub tells it to."""
_MAX_PAUSE_SECONDS = 5.0
_POLL_SECONDS = 0.1
_ANNOUNCE_SECONDS = 10.0
"""Deadline in seconds of an announcement, during which the hub connects back to this machine."""
_END_SECONDS = 2.0
"""Deadline in seconds of best-effort calls; if they fail, the hub finds out by itself later."""
_MOST_ANNOUNCED = 1_000
_MAX_ANNOUNCE_SECONDS = 100.0
_BUSY_SECONDS = 3.0
"""Seconds before an announcement is repeated that the hub was too busy to check."""


@dataclass
class _Failed:
    """The fingerprints of seeders that failed to deliver an object."""

    broken: list[str] = field(default_factory=list)
    busy: list[str] = field(default_factory=list)

    @property
    def count(self) -> int:
        """The number of failed seeders."""
        return len(self.broken) + len(self.busy)


class Seeding:
    """Exchanges public objects with other contributors of one hub. The caller must hold the home's lock.

    Args:
        client: Client of the hub; its ledger key is known only after the status was requested.
        policy: The contributor's settings.
        terms: The hub's settings.
        display: Displays what is fetched from others, and why this machine is not listed.
        grace_seconds: See ``fetch_from``.
    """

    def __init__(
        self,
        client: HubClient,
        policy: SeedingPolicy,
        terms: SeedingTerms,
        display: Display,
        grace_seconds: float = GRACE_SECONDS,
    ) -> None:
        self._client, self._policy, self._terms, self._display = client, policy, terms, display
        self._grace_seconds = grace_seconds
        self.totals = SeedingTotals(client.home, policy.max_bytes_per_day)
        self._store = SeedStore(seeds_folder(client.home), policy)
        self._server: SeederServer | None = None
        self._announcer = threading.Thread(target=self._announce_always, name="seeding", daemon=True)
        self._news, self._stop, self._announcing = threading.Event(), threading.Event(), threading.Lock()
        self._announce_seconds, self._why_not = 20.0, ""
        self._begun = self._is_listed = False
        self._pause_reasons: set[str] = set()
        self._direct = proxy_for(client.address) is None and bool(client.pin.fingerprint)

    def start(self) -> None:
        """Serve and announce the stored objects if the policy allows it; repeated calls have no effect.

        Must be called only after the contributor has accepted the text from ``in_words``.
        """
        if self._begun:
            return
        self._begun = True
        if not self._direct:
            text = "no seeding: the hub is reached without TLS, or through a proxy that other contributors cannot use"
            self._display.report("seeding", text)
        if self._policy.listen is None or not self._direct:
            return
        client = self._client
        server = SeederServer(
            self._policy, self.slots, self._store, self.totals, client.rates.up, self._verified, client.now
        )
        try:
            server.start()
        except GymError as error:
            self._display.report("seeding", f"this machine serves nothing: {error.message}; {error.hint}")
            return
        server.pause(bool(self._pause_reasons))  # a pause may have begun before
        self._server = server
        self._announce()
        self._announcer.start()

    def in_words(self) -> list[str]:
        """Describe what seeding does on this machine."""
        return self._policy.in_words(self._client.rates.up.bytes_per_second)

    def slots(self) -> int:
        """Return the number of concurrent downloads that this machine's limits allow."""
        return self._policy.slots(self._client.rates.up.bytes_per_second)

    def follow(self, policy: SeedingPolicy | None) -> None:
        """Apply a changed policy; None ends seeding. A new ``listen`` takes effect at the next ``join``."""
        if policy is None:
            self.close()
            return
        if self._stop.is_set():
            self._display.report(
                "seeding", "seeding has ended; the policy's seeding section takes effect at the next join"
            )
            return
        before, self._policy = self._policy, policy
        self.totals.max_bytes_per_day = policy.max_bytes_per_day
        self._store.follow(policy)
        if policy.listen is None:
            self._end_serving()
        elif policy.listen != before.listen:
            text = f"seeding.listen {policy.listen} takes effect at the next join"
            self._display.report("seeding", text)
        if self._server is not None:
            self._server.rate.bytes_per_second = policy.max_bytes_per_second
            self._news.set()

    def pause(self, reason: str, paused: bool) -> None:
        """Refuse downloads while there is a reason to pause: withdraw the announcement, then end running downloads."""
        (self._pause_reasons.add if paused else self._pause_reasons.discard)(reason)
        if self._server is not None and bool(self._pause_reasons) != self._server.is_paused:
            self._server.pause(bool(self._pause_reasons))
            self._news.set()

    def close(self) -> None:
        """Withdraw the announcement and stop the server."""
        if self._stop.is_set():
            return
        self._stop.set()
        try:
            self._end_serving()
        finally:
            self._store.close()
            self.totals.save()

    def _end_serving(self) -> None:
        server, self._server = self._server, None
        if server is None:
            return
        self._news.set()
        is_mine = self._announcing.acquire(timeout=_END_SECONDS)  # a running announcement would undo it
        try:
            if self._is_listed:
                self._client.call("Seed", pb.SeedRequest(), _END_SECONDS)  # port 0 withdraws the announcement
        except GymError as error:
            log.info("the announcement was not withdrawn: %s", error)
        finally:
            if is_mine:
                self._announcing.release()
            server.close()

    def add(self, path: Path, sha256: str, kind: Kind) -> None:
        """Announce a verified public object to the hub if it is large enough."""
        if self._server is not None and self._store.add(path, sha256, kind, self._terms.min_bytes):
            self._news.set()

    def share_base(self, folder: Path, files: Sequence[BaseFile]) -> None:
        """Announce the base files in a folder that match the hub's listing."""
        known = set(self._store.names())
        for file in files:
            path = folder / file.name
            if self._server is None or self._stop.is_set():
                return
            if file.sha256 in known or file.size_bytes < self._terms.min_bytes or not path.is_file():
                continue
            if path.stat().st_size == file.size_bytes and file_sha256(path) == file.sha256:
                self.add(path.resolve(), file.sha256, "base")

    def fetch(
        self,
        part: Path,
        sha256: str,
        size_bytes: int,
        kind: Kind,
        report: Callable[[int, int], None],
        should_stop: Callable[[], bool],
    ) -> bool:
        """Fetch an object from another contributor. Return False if it must be fetched from the hub.

        Args:
            part: File to write; deleted on failure.
            sha256: Digest of the object.
            size_bytes: Size of the object.
            kind: Kind of the object; it is fetched even if this machine does not serve objects of this kind.
            report: Called with completed and total bytes.
            should_stop: Checked between chunks and while waiting.

        Raises:
            GymError: ``INTERRUPTED`` after ``should_stop``, or an error on this machine such as ``DISK_FULL``. A
                failure of a seeder is not raised.
        """
        if self._stop.is_set() or size_bytes < self._terms.min_bytes or not self._direct:
            return False
        failed, left_seconds, wasted = _Failed(), time_limit(self._client, size_bytes, self._grace_seconds), 0
        until, ends_search = time.monotonic() + _MAX_WAIT_SECONDS, True
        will_serve = self._store.serves(kind, size_bytes)
        try:
            while (seeder := self._found(sha256, will_serve, failed, until, should_stop)) is not None:
                name, began, before = "", time.monotonic(), self.totals.now.received
                try:
                    require_seeder(seeder, self._client.address.host)
                    name = fingerprint(seeder.certificate_pem.encode())
                    self._receive(seeder, part, sha256, size_bytes, report, should_stop, left_seconds)
                except GymError as error:
                    is_stopped = error.code is ErrorCode.INTERRUPTED and should_stop()
                    if is_stopped or error.code not in _SEEDER_ERRORS:
                        raise
                    (failed.busy if error.code is ErrorCode.BUSY else failed.broken).append(name)
                    log.info("object %s was not fetched from a contributor: %s", sha256[:12], error)
                    report(0, size_bytes)
                    left_seconds -= time.monotonic() - began
                    wasted += self.totals.now.received - before
                    if left_seconds <= 0 or wasted >= size_bytes or failed.count >= _MAX_FAILED:
                        return False
                    continue
                text = f"{readable_bytes(size_bytes)} came from another contributor"
                self._display.report("seeding", text, sha256=sha256, bytes=size_bytes)
                return True
            ends_search = False  # the hub serves the object now, and others may wait for this machine's copy
            return False
        finally:
            if ends_search:
                self._end_search(failed)

    def _receive(
        self,
        seeder: pb.SeederInfo,
        part: Path,
        sha256: str,
        size_bytes: int,
        report: Callable[[int, int], None],
        should_stop: Callable[[], bool],
        most_seconds: float,
    ) -> None:
        done = 0

        def on_bytes(num_bytes: int) -> None:
            nonlocal done
            done += num_bytes
            self.totals.receive(num_bytes)
            report(done, size_bytes)

        unverified = part.with_suffix(".seed")  # the hub's download must not resume unverified bytes
        down, grace = self._client.rates.down, self._grace_seconds
        fetch_from(seeder, sha256, size_bytes, unverified, down, on_bytes, should_stop, grace, most_seconds)
        os.replace(unverified, part)

    def _end_search(self, failed: _Failed) -> None:
        """Release the last seeder's slot on the hub, and report the seeder's failure."""
        try:
            request = pb.FindSeederRequest(failed=failed.broken, busy=failed.busy)
            self._client.call("FindSeeder", request, _END_SECONDS)
        except GymError as error:
            log.info("the hub was not informed that a search has ended: %s", error)

    def _found(
        self,
        sha256: str,
        will_serve: bool,
        failed: _Failed,
        until: float,
        should_stop: Callable[[], bool],
    ) -> pb.SeederInfo | None:
        """Return a seeder, after waiting as long as the hub advises; None if the hub must serve the object."""
        while True:
            try:
                request = pb.FindSeederRequest(
                    sha256=sha256, failed=failed.broken, busy=failed.busy, will_not_serve=not will_serve
                )
                reply = self._client.call("FindSeeder", request)
            except GymError as error:
                log.info("the hub returned no seeder of %s: %s", sha256[:12], error)
                return None
            if reply.HasField("seeder"):
                seeder: pb.SeederInfo = reply.seeder
                return seeder
            if not reply.wait_seconds > 0 or time.monotonic() > until:
                return None
            end = time.monotonic() + min(reply.wait_seconds, _MAX_PAUSE_SECONDS)
            while time.monotonic() < end:
                if should_stop():
                    raise GymError(ErrorCode.INTERRUPTED, "stopped while waiting for a seeder")
                time.sleep(_POLL_SECONDS)

    def _verified(self, text: str, seeder: str) -> SeedTicket:
        pin = self._client.pin
        return SeedTicket.verified(
            text, bytes.fromhex(pin.ledger_key), pin.server, seeder, self._client.now()
        )

    # ---- announcements ----

    def _announce_always(self) -> None:
        while not self._stop.is_set():
            self._news.wait(self._announce_seconds)
            self._news.clear()
            if self._server is None:
                return
            self._announce()

    def _announce(self) -> None:
        """Announce the objects or withdraw them. A failed call is repeated with the next announcement."""
        with self._announcing:
            if (server := self._server) is None:
                return
            is_paused, slots = server.is_paused, self.slots()
            request = pb.SeedRequest()
            if slots and not is_paused and self.totals.may_serve(self._terms.min_bytes):
                request = pb.SeedRequest(
                    port=self._policy.port or server.port,
                    certificate_pem=server.certificate_pem,
                    slots=slots,
                    sha256=self._store.names()[-_MOST_ANNOUNCED:],
                )
            try:
                reply = self._client.call("Seed", request, _ANNOUNCE_SECONDS)
            except GymError as error:
                log.info("seeding is not announced: %s", error)
                if error.code is ErrorCode.BUSY:
                    self._announce_seconds = _BUSY_SECONDS
                return
            finally:
                if is_paused:
                    server.end_downloads()  # after the withdrawal, so that nobody reports a failure
            self._announce_seconds = min(max(1.0, reply.lease_seconds / 3), _MAX_ANNOUNCE_SECONDS)
            self._is_listed = request.port != 0 and not reply.why_not
            if request.port != 0 or not slots:  # a withdrawal lists nothing, so there is no reason to show
                self._show(reply.why_not if slots else TOO_SLOW)

    def _show(self, why_not: str) -> None:
        """Report, once each, why this machine is not listed and that it is listed again."""
        if why_not != self._why_not:
            text = f"this machine is not listed: {why_not}" if why_not else "this machine is listed again"
            self._display.report("seeding", text)
        self._why_not = why_not
