"""The seeding tracker, which records seeders of public objects and directs contributors to them.

All state is in memory and expires; after a restart of the hub, seeders announce themselves again. A contributor gets
one seeder at a time. While future seeders of an object are fetching it, other contributors wait for a bounded time, so
that the hub sends few copies.
"""

from __future__ import annotations

import asyncio
import re
import secrets
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Collection
from contextlib import asynccontextmanager
from dataclasses import dataclass

from gym_fed.config.hub.seeding import SeedingConfig
from gym_fed.core.addresses import host_port, may_connect, network_of
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.core.text import counted
from gym_fed.trust.identity.keys import SigningKey
from gym_fed.trust.identity.ticket import SeedTicket
from gym_fed.trust.identity.tls import fingerprint
from gym_fed.trust.wire.v1 import hub_pb2 as pb
from gym_server.accounts.accounts import Session
from gym_server.rpc.limits import TokenBuckets
from gym_server.seeding.probe import Probe, probe_seeder
from gym_server.seeding.searches import BaseWaits, HubCopies, SeedSearch, SeedSearches, SpreadTimes
from gym_server.seeding.seeders import Seeder, SeederList, SeederReports
from gym_server.traffic import HubTraffic

LEASE_SECONDS = 60.0
"""Lifetime of an announcement, in seconds; seeders renew it after a third of that."""
TICKET_SECONDS = 60
"""Validity of a ticket, within which its download must begin, in seconds."""
MAX_OBJECTS = 1_000
"""Maximum number of objects per announcement."""
TICKETS_PER_MINUTE = 60
"""Rate limit on tickets per account, since each reveals a seeder's address; at most ``_MAX_TICKETS`` accumulate."""
_MAX_TICKETS = 200
_MAX_PROBES = 16
_MAX_PROBES_PER_NETWORK = 8
_MAX_SEEDERS = 2_000
_MAX_CERTIFICATE_CHARS = 4_096
_MAX_SLOTS = 64
_LEAST_PORT = 1_024
_WAIT_SECONDS = 0.5
_WAITING_PER_SECOND = 100
"""Total rate of calls from all contributors that wait for an object, in calls per second."""
_SLOWEST_BYTES_PER_SECOND = 64 << 10
"""Assumed minimum rate of a download, in bytes per second, which bounds how long it occupies a seeder's slot."""
_MAX_DOWNLOAD_SECONDS = 1800.0
"""Time after which any download counts as ended, in seconds, since its client may have been killed."""
_SHARE_OF_ROUND = 0.25
"""Maximum time that a contributor waits for a soup, as a fraction of the round's deadline."""
_EXPIRE_SECONDS = 1.0
_MAX_FAILED = 8
_SHA256 = re.compile(r"[0-9a-f]{64}", re.ASCII)


@dataclass(frozen=True)
class PublicObject:
    """A public object: its size, and True if it is a file of the base."""

    size_bytes: int
    is_base: bool


class SeedTracker:
    """The seeders of one hub. Not thread-safe: use it on the event loop's thread.

    Args:
        config: The hub's settings; None if it does not allow seeding.
        server: Id of the hub.
        key: The hub's ledger key, which signs tickets.
        now: The hub's clock, Unix seconds.
        on_loopback: True if the hub listens on loopback, which also allows seeders on loopback.
        public: Function that returns the public ones among given objects; runs on a thread.
        describe: Function that describes a public object, or returns None for any other; runs on a thread.
        round_seconds: Deadline of a round, which limits how long contributors wait for a soup.
        traffic: Counters of the hub.
        probe: Function that connects to a seeder and checks its certificate.
        clock: Monotonic clock in seconds; tests pass their own.
    """

    def __init__(
        self,
        config: SeedingConfig | None,
        server: str,
        key: SigningKey,
        now: Callable[[], float],
        on_loopback: bool,
        public: Callable[[Collection[str]], set[str]],
        describe: Callable[[str], PublicObject | None],
        round_seconds: float,
        traffic: HubTraffic,
        probe: Probe = probe_seeder,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._config, self._server, self._key, self._now = config, server, key, now
        self._on_loopback, self._public, self._describe = on_loopback, public, describe
        self._round_seconds = round_seconds
        self._traffic, self._probe, self._clock = traffic, probe, clock
        self._seeders, self._reports = SeederList(), SeederReports()
        self._searches, self._copies = SeedSearches(), HubCopies()
        self._spread, self._base_waits = SpreadTimes(), BaseWaits()
        self._tickets = TokenBuckets(TICKETS_PER_MINUTE / 60, _MAX_TICKETS, clock=clock)
        self._probed: Counter[str] = Counter()  # running probes by account and by network
        self._probes = asyncio.Semaphore(_MAX_PROBES)
        self._expired = 0.0
        traffic.seeders = lambda: len(self._seeders)

    async def announce(self, caller: Session, host: str, request: pb.SeedRequest) -> pb.SeedReply:
        """List a seeder, or renew or withdraw its announcement.

        Args:
            caller: The caller.
            host: The caller's IP address as seen by the hub; the seeder must listen on it.
            request: The announcement.

        Raises:
            GymError: ``POLICY_REFUSED`` if the hub does not allow seeding; ``USAGE`` or ``TOO_LARGE`` for a malformed
                announcement; ``BUSY`` while a seeder of the account, or too many of its network, are being probed.
        """
        self._settings()
        self._expire()
        node = caller.node_id
        if request.port == 0:
            self._seeders.drop(node)
            return pb.SeedReply(lease_seconds=LEASE_SECONDS)
        name = self._checked_name(request)
        if why := self._why_not(caller, host, name):
            return self._not_listed(node, why)
        known = self._seeders.get(node)
        if known is None or (known.host, known.port, known.name) != (host, request.port, name):
            async with self._probing(caller.contributor, host):
                is_there = await self._probe(host, request.port, request.certificate_pem)
            if not is_there:
                where = host_port(host, request.port)
                text = f"the hub cannot reach this seeder at {where}; open the port, or forward it"
                return self._not_listed(node, text)
        objects = frozenset(await asyncio.to_thread(self._public, set(request.sha256)))
        if why := self._why_not(caller, host, name):  # other seeders were listed in the meantime
            return self._not_listed(node, why)
        now, known = self._clock(), self._seeders.get(node)
        for sha256 in objects - (known.objects if known else frozenset()):
            if self._searches.wanted[sha256]:
                self._spread.note(sha256, caller.contributor, now)
        slots = max(1, min(request.slots, _MAX_SLOTS))
        self._seeders.put(
            node,
            Seeder(
                caller.contributor,
                host,
                request.port,
                request.certificate_pem,
                name,
                slots,
                objects,
                now + LEASE_SECONDS,
            ),
        )
        self._copies.served(caller.contributor, objects)
        search = self._searches.get(node)
        if search is not None and search.sha256 in objects:
            self._searches.drop(node)
        return pb.SeedReply(lease_seconds=LEASE_SECONDS)

    async def find(self, caller: Session, host: str, request: pb.FindSeederRequest) -> pb.FindSeederReply:
        """Return a seeder of an object with a ticket, the time to wait for one, or neither.

        Args:
            caller: The caller.
            host: IP address from which the hub sees the call.
            request: The object (empty to end the last search), and the seeders that failed to deliver it to the caller.

        Raises:
            GymError: ``POLICY_REFUSED`` if the hub does not allow seeding; ``USAGE`` for a name that is not a sha256.
        """
        config, sha256 = self._settings(), request.sha256
        if sha256 and not _SHA256.fullmatch(sha256):
            raise _not_a_sha256()
        found = await asyncio.to_thread(self._describe, sha256) if sha256 else None
        self._expire()
        now, node = self._clock(), caller.node_id
        failed = set(request.failed[:_MAX_FAILED])
        before = self._searches.get(node)
        if before is not None and before.seeder in failed:
            # A caller can only report the seeder to which the hub directed it.
            self._report(caller.contributor, before.seeder)
        if found is None or found.size_bytes < config.min_bytes:
            self._searches.drop(node)
            return pb.FindSeederReply()
        until = now + min(10 + found.size_bytes / _SLOWEST_BYTES_PER_SECOND, _MAX_DOWNLOAD_SECONDS)
        search = self._searches.renew(node, caller.contributor, sha256, now, until)
        tried = failed | set(request.busy[:_MAX_FAILED])
        having = self._usable(caller, host, sha256, tried)
        chosen = self._least_busy(having)
        if chosen is not None and self._tickets.take(caller.contributor) == 0:
            self._searches.send(search, chosen)
            search.waits_since = None
            self._reports.note_ticket(caller.contributor)
            return pb.FindSeederReply(seeder=self._with_ticket(chosen, sha256))
        copies = self._copies.of(sha256)
        sibling = copies.get(caller.contributor)
        others = len(copies) - (sibling is not None)
        will_seed = (
            node in self._seeders
            and not request.will_not_serve
            and not self._copies.slow.has(caller.contributor, now)
        )
        must_wait = (
            self._is_worth_a_wait(caller, having)
            or others >= (config.hub_copies if will_seed else 1)
            or (sibling is not None and sibling[0] != node)  # another node of the account is fetching it
        )
        if must_wait and self._may_wait(search, node, found, now):
            search.waits_since = now
            seconds = _WAIT_SECONDS + self._searches.wanted[sha256] / _WAITING_PER_SECOND
            return pb.FindSeederReply(wait_seconds=seconds)
        search.waits_since = None
        search.until = now + config.idle_seconds(found.size_bytes)
        if will_seed:
            self._copies.add(sha256, caller.contributor, node, search.until)
        return pb.FindSeederReply()

    # ---- the list ----

    def _settings(self) -> SeedingConfig:
        if self._config is None:
            raise GymError(
                ErrorCode.POLICY_REFUSED,
                "this hub does not allow seeding",
                "fetch everything from the hub itself",
            )
        return self._config

    def _checked_name(self, request: pb.SeedRequest) -> str:
        """Return the fingerprint of the key in an announcement."""
        if not _LEAST_PORT <= request.port <= 65_535:
            raise GymError(
                ErrorCode.USAGE,
                f"port {request.port} is not in {_LEAST_PORT} to 65535",
                "announce another port",
            )
        if len(request.sha256) > MAX_OBJECTS or len(request.certificate_pem) > _MAX_CERTIFICATE_CHARS:
            raise GymError(
                ErrorCode.TOO_LARGE,
                f"the announcement has {counted(len(request.sha256), 'object')} and a certificate of "
                f"{counted(len(request.certificate_pem), 'character')}; at most {MAX_OBJECTS} and "
                f"{_MAX_CERTIFICATE_CHARS}",
            )
        if not all(map(_SHA256.fullmatch, request.sha256)):
            raise _not_a_sha256()
        pem = request.certificate_pem
        if not pem.isascii() or pem.count("BEGIN CERTIFICATE") != 1:
            raise GymError(ErrorCode.USAGE, "the announcement must have exactly one certificate, in PEM")
        try:
            return fingerprint(pem.encode())
        except GymError as error:
            text = f"the announcement has an invalid certificate: {error.message}"
            raise GymError(ErrorCode.USAGE, text) from error

    def _not_listed(self, node: int, why: str) -> pb.SeedReply:
        self._seeders.drop(node)
        return pb.SeedReply(lease_seconds=LEASE_SECONDS, why_not=why)

    @asynccontextmanager
    async def _probing(self, contributor: str, host: str) -> AsyncIterator[None]:
        """Hold a probe slot for the block.

        Raises:
            GymError: ``BUSY`` if the account or its network already has too many probes.
        """
        network = network_of(host)
        if self._probed[contributor] or self._probed[network] >= _MAX_PROBES_PER_NETWORK:
            raise GymError(
                ErrorCode.BUSY,
                "another announcement of this account or network is being checked",
                "repeat the announcement later",
            )
        self._probed.update((contributor, network))
        try:
            async with self._probes:
                yield
        finally:
            self._probed.subtract((contributor, network))
            self._probed += Counter()  # drops zeros

    def _why_not(self, caller: Session, host: str, name: str) -> str:
        """Return the reason not to list a caller; empty if it may be probed."""
        if not may_connect(host, "127.0.0.1" if self._on_loopback else "10.0.0.0"):
            return "the hub sees this contributor at an address that others cannot connect to"
        if self._reports.banned.has(caller.contributor, self._clock()):
            return "other contributors reported this seeder; it is listed again after an hour"
        if self._seeders.node_of(name) not in (None, caller.node_id):
            return "another contributor announced this certificate"
        if caller.node_id not in self._seeders and len(self._seeders) >= _MAX_SEEDERS:
            return f"{_MAX_SEEDERS} seeders are already listed"
        return ""

    def _expire(self) -> None:
        """Drop expired entries, at most once a second."""
        now = self._clock()
        if now < self._expired + _EXPIRE_SECONDS:
            return
        self._expired = now
        self._seeders.expire(now)
        self._searches.expire(now)
        self._copies.expire(now)
        self._base_waits.expire(now)
        self._spread.keep(self._searches.wanted.keys())

    def _report(self, contributor: str, name: str) -> None:
        """Record that a seeder failed, unless it has since withdrawn its announcement."""
        self._traffic.note_failed_seeder()
        if (seeder := self._seeders.named(name)) is not None:
            self._reports.add(contributor, seeder.contributor, self._clock())

    # ---- one object ----

    def _usable(self, caller: Session, host: str, sha256: str, tried: Collection[str]) -> list[Seeder]:
        """Return the seeders of an object to which a caller at an address may connect."""
        now = self._clock()
        return [
            seeder
            for node, seeder in self._seeders.having(sha256)
            if node != caller.node_id
            and seeder.name not in tried
            and (":" in seeder.host) == (":" in host)  # the caller may have no route to the other family
            and may_connect(seeder.host, host)
            and not self._reports.banned.has(seeder.contributor, now)
        ]

    def _least_busy(self, seeders: Collection[Seeder]) -> Seeder | None:
        """Return a seeder with the fewest downloads; None if all are busy.

        Seeders declare their own number of slots, so a larger number does not attract more downloads.
        """
        downloads = self._searches.downloads
        free = [seeder for seeder in seeders if downloads[seeder.name] < seeder.slots]
        return min(free, key=lambda seeder: (downloads[seeder.name], secrets.randbits(16)), default=None)

    def _is_worth_a_wait(self, caller: Session, seeders: Collection[Seeder]) -> bool:
        """Return True if another account than its own occupies one of the busy seeders.

        Otherwise an account could announce every new object and delay others by downloading from itself.
        """
        own = self._searches.own_downloads
        return any(
            seeder.contributor == caller.contributor or own[seeder.name] < seeder.slots for seeder in seeders
        )

    def _may_wait(self, search: SeedSearch, node: int, found: PublicObject, now: float) -> bool:
        """Return True if a node may keep waiting; the waits for one object and for the entire base are bounded."""
        config, size = self._settings(), found.size_bytes
        most = config.wait_seconds(size)
        if not found.is_base:
            most = min(most, _SHARE_OF_ROUND * self._round_seconds)
        else:
            if search.waits_since is not None:
                self._base_waits.add(node, now - search.waits_since, now)
            if self._base_waits.seconds(node) >= config.max_wait_seconds:
                return False
        since = max(search.began, self._spread.last(search.sha256))
        return now < min(since + config.idle_seconds(size), search.began + most)

    def _with_ticket(self, seeder: Seeder, sha256: str) -> pb.SeederInfo:
        expires = int(self._now()) + TICKET_SECONDS
        ticket = SeedTicket(self._server, seeder.name, sha256, secrets.token_hex(16), expires)
        self._traffic.note_ticket()
        return pb.SeederInfo(
            host=seeder.host,
            port=seeder.port,
            certificate_pem=seeder.certificate_pem,
            ticket_json=ticket.signed(self._key),
        )


def _not_a_sha256() -> GymError:
    return GymError(ErrorCode.USAGE, "an object's name is not a sha256", "use 64 lower-case hex digits")
