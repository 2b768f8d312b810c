"""The tracker of seeding: which contributors serve which public objects, and who fetches an object from where.

Everything is in memory and expires; after a restart of the hub, seeders announce themselves again. A contributor gets
one seeder at a time. While contributors who will seed an object fetch it, others wait for them, for a bounded time, so
that the hub sends few copies.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections import OrderedDict
from collections.abc import Callable, Collection
from dataclasses import dataclass, field

from gym_fed.config.hub.seeding import SeedingConfig
from gym_fed.core.addresses import host_port, may_connect
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.core.text import counted
from gym_fed.trust.identity.keys import SigningKey
from gym_fed.trust.identity.ticket import SeedTicket
from gym_fed.trust.identity.tls import fingerprint
from gym_fed.trust.wire.v1 import hub_pb2 as pb
from gym_server.accounts.accounts import Session
from gym_server.seeding.probe import Probe, probe_seeder
from gym_server.traffic import HubTraffic

LEASE_SECONDS = 60.0
"""Time for which an announcement counts; seeders repeat it three times as often."""
TICKET_SECONDS = 60
"""Time in which a download with a ticket may begin."""
MAX_OBJECTS = 1_000
"""Maximum objects per announcement."""
_MAX_PROBES = 16
_MAX_SEEDERS = 2_000
_MAX_WISHES = 20_000
_MAX_CERTIFICATE_CHARS = 4_096
_MAX_SLOTS = 64
_LEAST_PORT = 1_024
_WAIT_SECONDS = 0.5
_WAITING_PER_SECOND = 100
"""Calls per second of all that wait for an object."""
_SLOWEST_BYTES_PER_SECOND = 64 << 10
"""Rate at which a slot of a seeder is assumed to be busy at most."""
_BAD_REPORTS = 2
"""Reports by as many contributors take a seeder off the list for ``_MARK_SECONDS``."""
_MARK_SECONDS = 3600.0
_MAX_FAILED = 8


@dataclass(eq=False)
class _Seeder:
    """A contributor who serves objects."""

    contributor: str
    host: str
    port: int
    certificate_pem: str
    name: str
    """Fingerprint of its TLS key."""
    slots: int
    objects: frozenset[str]
    expires: float
    reporters: set[str] = field(default_factory=set)


@dataclass
class _Wish:
    """A node's search for one object.

    Attributes:
        contributor: Account of the node.
        sha256: The object.
        began: Monotonic time of the first request.
        seeder: Name of the seeder that the node was sent to; empty for none.
        from_hub: True if the node will seed the object, and was sent to the hub for it.
        until: Monotonic time at which a download counts as ended.
    """

    contributor: str
    sha256: str
    began: float
    seeder: str = ""
    from_hub: bool = False
    until: float = 0.0


class SeedTracker:
    """The seeders of one hub. Not thread-safe: use it on the event loop's thread.

    Args:
        config: The hub's settings; None if it allows no seeding.
        server: Id of the hub.
        key: The hub's ledger key, which signs tickets.
        now: The hub's clock, Unix seconds.
        on_loopback: True if the hub listens on loopback; seeders may be there only then.
        public: Returns those of some objects that every contributor may read; runs on a thread.
        size_of: Returns the size of a public object in bytes; None for any other; runs on a thread.
        traffic: Counters of the hub.
        probe: Connects to a seeder, which must present its certificate.
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
        size_of: Callable[[str], int | None],
        traffic: HubTraffic,
        probe: Probe = probe_seeder,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._config, self._server, self._key, self._now = config, server, key, now
        self._on_loopback, self._public, self._size_of = on_loopback, public, size_of
        self._traffic, self._probe, self._clock = traffic, probe, clock
        self._seeders: dict[int, _Seeder] = {}  # by node
        self._wishes: OrderedDict[int, _Wish] = OrderedDict()  # by node, which downloads one object at a time
        self._spread: dict[str, float] = {}  # when the last contributor got an object that others wait for
        self._banned, self._slow = _AccountMarks(), _AccountMarks()
        self._probes = asyncio.Semaphore(_MAX_PROBES)
        traffic.seeders = lambda: len(self._seeders)

    async def announce(self, caller: Session, host: str, request: pb.SeedRequest) -> pb.SeedReply:
        """List a seeder, or renew or withdraw its announcement.

        Args:
            caller: The caller.
            host: IP address from which the hub sees the call; the seeder must listen there.
            request: The announcement.

        Raises:
            GymError: ``POLICY_REFUSED`` if the hub allows no seeding; ``USAGE`` or ``TOO_LARGE`` for a malformed
                announcement.
        """
        self._settings()
        self._expire()
        node = caller.node_id
        if request.port == 0:
            self._seeders.pop(node, None)
            return pb.SeedReply(lease_seconds=LEASE_SECONDS)
        self._check(request)
        try:
            name = fingerprint(request.certificate_pem.encode())
        except GymError as error:
            text = f"the announcement has an invalid certificate: {error.message}"
            raise GymError(ErrorCode.USAGE, text) from error
        if why := self._why_not(caller, host, name):
            self._seeders.pop(node, None)
            return pb.SeedReply(lease_seconds=LEASE_SECONDS, why_not=why)
        known = self._seeders.get(node)
        place = host, request.port, name
        if known is None or (known.host, known.port, known.name) != place:
            async with self._probes:
                is_there = await self._probe(host, request.port, request.certificate_pem)
            if not is_there:
                self._seeders.pop(node, None)
                where = host_port(host, request.port)
                text = f"the hub does not reach this seeder at {where}; open the port, or forward it"
                return pb.SeedReply(lease_seconds=LEASE_SECONDS, why_not=text)
            known = None
        objects = await asyncio.to_thread(self._public, set(request.sha256))
        wanted = {wish.sha256 for wish in self._wishes.values()}
        before = known.objects if known else frozenset[str]()
        self._spread.update(dict.fromkeys(wanted & objects - before, self._clock()))
        self._seeders[node] = _Seeder(
            caller.contributor,
            host,
            request.port,
            request.certificate_pem,
            name,
            max(1, min(request.slots, _MAX_SLOTS)),
            frozenset(objects),
            self._clock() + LEASE_SECONDS,
            known.reporters if known else set(),
        )
        wish = self._wishes.get(node)
        if wish is not None and wish.sha256 in objects:
            del self._wishes[node]
        return pb.SeedReply(lease_seconds=LEASE_SECONDS)

    async def find(self, caller: Session, host: str, request: pb.FindSeederRequest) -> pb.FindSeederReply:
        """Return a seeder of an object with a ticket, the time to wait for one, or neither.

        Args:
            caller: The caller.
            host: IP address from which the hub sees the call.
            request: The object, and the seeders that failed to deliver it to the caller.

        Raises:
            GymError: ``POLICY_REFUSED`` if the hub allows no seeding.
        """
        config = self._settings()
        failed = set(request.failed[:_MAX_FAILED])
        tried = failed | set(request.busy[:_MAX_FAILED])
        size = await asyncio.to_thread(self._size_of, request.sha256)
        self._expire()
        if size is None or size < config.min_bytes:
            return pb.FindSeederReply()
        now, node = self._clock(), caller.node_id
        wish = self._wishes.pop(node, None)
        if wish is None or wish.sha256 != request.sha256:
            wish = _Wish(caller.contributor, request.sha256, now)
        self._wishes[node] = wish
        if wish.seeder in failed:  # only the seeder that the hub has sent the caller to can be reported by it
            self._report(caller.contributor, wish.seeder)
        wish.seeder, wish.from_hub, wish.until = "", False, now + 10 + size / _SLOWEST_BYTES_PER_SECOND
        having = [
            seeder
            for other, seeder in self._seeders.items()
            if not self._banned.has(seeder.contributor, now)
            and request.sha256 in seeder.objects
            and other != node
            and seeder.name not in tried
            and may_connect(seeder.host, host)
        ]
        if chosen := self._least_busy(having):
            wish.seeder = chosen.name
            return pb.FindSeederReply(seeder=self._with_ticket(chosen, request.sha256))
        same = [other for other in self._wishes.values() if other.sha256 == request.sha256]
        copies = sum(other.from_hub for other in same)
        will_seed = node in self._seeders and not self._slow.has(caller.contributor, now)
        must_wait = bool(having) or copies >= (config.hub_copies if will_seed else 1)
        since = max(wish.began, self._spread.get(request.sha256, 0.0))
        ends = min(since + config.idle_seconds(size), wish.began + config.wait_seconds(size))
        if must_wait and now < ends:
            return pb.FindSeederReply(wait_seconds=_WAIT_SECONDS + len(same) / _WAITING_PER_SECOND)
        wish.from_hub = will_seed
        wish.until = now + config.idle_seconds(size)
        return pb.FindSeederReply()

    # ---- the list ----

    def _settings(self) -> SeedingConfig:
        if self._config is None:
            raise GymError(
                ErrorCode.POLICY_REFUSED, "this hub allows no seeding", "fetch everything from the hub itself"
            )
        return self._config

    def _check(self, request: pb.SeedRequest) -> None:
        if not _LEAST_PORT <= request.port <= 65_535:
            raise GymError(
                ErrorCode.USAGE, f"port {request.port} is not from {_LEAST_PORT} to 65535", "announce another"
            )
        if len(request.sha256) > MAX_OBJECTS or len(request.certificate_pem) > _MAX_CERTIFICATE_CHARS:
            raise GymError(
                ErrorCode.TOO_LARGE,
                f"an announcement of {counted(len(request.sha256), 'object')} with a certificate of "
                f"{counted(len(request.certificate_pem), 'character')}; at most {MAX_OBJECTS} and "
                f"{_MAX_CERTIFICATE_CHARS}",
            )

    def _why_not(self, caller: Session, host: str, name: str) -> str:
        """Return why a caller is not listed; empty if it may be probed."""
        if not may_connect(host, "127.0.0.1" if self._on_loopback else "10.0.0.0"):
            return "the hub sees this contributor at an address that others cannot connect to"
        if self._banned.has(caller.contributor, self._clock()):
            return "other contributors reported this seeder; it is listed again after an hour"
        if any(seeder.name == name and node != caller.node_id for node, seeder in self._seeders.items()):
            return "another contributor announced this certificate"
        if caller.node_id not in self._seeders and len(self._seeders) >= _MAX_SEEDERS:
            return f"{_MAX_SEEDERS} seeders are listed already"
        return ""

    def _expire(self) -> None:
        """Drop announcements and searches that have ended."""
        now = self._clock()
        self._seeders = {node: seeder for node, seeder in self._seeders.items() if seeder.expires > now}
        for node, wish in [(node, wish) for node, wish in self._wishes.items() if wish.until <= now]:
            if (
                wish.from_hub
            ):  # others waited for a copy that did not come; they do not wait for this account again
                self._slow.add(wish.contributor, now)
            del self._wishes[node]
        while len(self._wishes) > _MAX_WISHES:
            self._wishes.popitem(last=False)
        wanted = {wish.sha256 for wish in self._wishes.values()}
        self._spread = {sha256: at for sha256, at in self._spread.items() if sha256 in wanted}

    def _report(self, contributor: str, name: str) -> None:
        """Note that a seeder failed; several reporters take it off the list."""
        self._traffic.note_failed_seeder()
        seeder = next((s for s in self._seeders.values() if s.name == name), None)
        if seeder is not None:
            seeder.reporters.add(contributor)
            if len(seeder.reporters) >= _BAD_REPORTS:
                self._banned.add(seeder.contributor, self._clock())

    # ---- one object ----

    def _least_busy(self, seeders: Collection[_Seeder]) -> _Seeder | None:
        """Return the seeder with the most free slots; None if all are busy."""
        busy = {seeder: 0 for seeder in seeders}
        by_name = {seeder.name: seeder for seeder in seeders}
        for wish in self._wishes.values():
            if (seeder := by_name.get(wish.seeder)) is not None:
                busy[seeder] += 1
        free = [seeder for seeder in seeders if busy[seeder] < seeder.slots]
        return min(free, key=lambda seeder: (busy[seeder] / seeder.slots, secrets.randbits(16)), default=None)

    def _with_ticket(self, seeder: _Seeder, sha256: str) -> pb.SeederInfo:
        expires = int(self._now()) + TICKET_SECONDS
        ticket = SeedTicket(self._server, seeder.name, sha256, secrets.token_hex(16), expires)
        self._traffic.note_ticket()
        return pb.SeederInfo(
            host=seeder.host,
            port=seeder.port,
            certificate_pem=seeder.certificate_pem,
            ticket_json=ticket.signed(self._key),
        )


class _AccountMarks:
    """Accounts that are marked for ``_MARK_SECONDS``; the oldest marks beyond ``_MAX_WISHES`` are dropped."""

    def __init__(self) -> None:
        self._until: OrderedDict[str, float] = OrderedDict()

    def add(self, contributor: str, now: float) -> None:
        self._until[contributor] = now + _MARK_SECONDS
        while len(self._until) > _MAX_WISHES:
            self._until.popitem(last=False)

    def has(self, contributor: str, now: float) -> bool:
        return self._until.get(contributor, now) > now
