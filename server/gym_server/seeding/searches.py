"""Searches for objects, and the time that contributors spend waiting for a seeder."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Collection
from dataclasses import dataclass, field

from gym_server.seeding.seeders import MARK_SECONDS, AccountMarks, Seeder

_MAX_SEARCHES = 20_000


@dataclass
class SeedSearch:
    """A node's search for one object.

    Attributes:
        contributor: Account of the node.
        sha256: The object.
        began: Monotonic time of the first request.
        until: Monotonic time at which a download counts as ended.
        seeder: Name of the seeder that the node was sent to; empty for none.
        is_own: True if that seeder belongs to the same account.
        waits_since: Monotonic time since which the node has been asked to wait; None if the last reply was a different
            one.
    """

    contributor: str
    sha256: str
    began: float
    until: float = 0.0
    seeder: str = ""
    is_own: bool = False
    waits_since: float | None = None


class SeedSearches:
    """The searches of nodes, each of which downloads one object at a time.

    ``downloads`` counts running downloads by seeder, ``own_downloads`` those of the seeder's own account, and
    ``wanted`` the searches by object.
    """

    def __init__(self) -> None:
        self.downloads: Counter[str] = Counter()
        self.own_downloads: Counter[str] = Counter()
        self.wanted: Counter[str] = Counter()
        self._nodes: OrderedDict[int, SeedSearch] = OrderedDict()

    def get(self, node: int) -> SeedSearch | None:
        """Return the search of a node."""
        return self._nodes.get(node)

    def renew(self, node: int, contributor: str, sha256: str, now: float, until: float) -> SeedSearch:
        """Begin or renew a node's search for an object, without a seeder; its search for another object ends."""
        before = self._nodes.get(node)
        self.drop(node)
        search = SeedSearch(contributor, sha256, now)
        if before is not None and before.sha256 == sha256:
            search.began, search.waits_since = before.began, before.waits_since
        search.until = until
        self._nodes[node] = search
        self.wanted[sha256] += 1
        while len(self._nodes) > _MAX_SEARCHES:
            self.drop(next(iter(self._nodes)))
        return search

    def send(self, search: SeedSearch, seeder: Seeder) -> None:
        """Record that a node was directed to a seeder."""
        search.seeder, search.is_own = seeder.name, seeder.contributor == search.contributor
        self.downloads[seeder.name] += 1
        if search.is_own:
            self.own_downloads[seeder.name] += 1

    def drop(self, node: int) -> None:
        """End the search of a node, if there is one."""
        if (search := self._nodes.pop(node, None)) is None:
            return
        _decrease(self.wanted, search.sha256)
        if search.seeder:
            _decrease(self.downloads, search.seeder)
            if search.is_own:
                _decrease(self.own_downloads, search.seeder)

    def expire(self, now: float) -> None:
        """End the searches whose downloads count as ended."""
        for node in [node for node, search in self._nodes.items() if search.until <= now]:
            self.drop(node)


class HubCopies:
    """Copies that the hub sends to future seeders while others wait for them.

    A copy is listed until its account announces the object, or until its deadline, which further requests do not
    extend. ``slow`` contains the accounts that missed a deadline.
    """

    def __init__(self) -> None:
        self.slow = AccountMarks()
        self._objects: dict[
            str, dict[str, tuple[int, float]]
        ] = {}  # node and deadline, by object and account

    def of(self, sha256: str) -> dict[str, tuple[int, float]]:
        """Return node and deadline of each account that fetches an object."""
        return self._objects.get(sha256, {})

    def add(self, sha256: str, contributor: str, node: int, deadline: float) -> None:
        """Record a copy, unless the account already has one."""
        self._objects.setdefault(sha256, {}).setdefault(contributor, (node, deadline))

    def served(self, contributor: str, objects: Collection[str]) -> None:
        """Record the objects that an account announces."""
        for sha256 in [sha256 for sha256, copies in self._objects.items() if contributor in copies]:
            if sha256 in objects:
                self._drop(sha256, contributor)

    def expire(self, now: float) -> None:
        """Remove the copies whose deadline has passed, and mark their accounts as slow."""
        for sha256, copies in list(self._objects.items()):
            for contributor, (_, deadline) in list(copies.items()):
                if deadline <= now:
                    self.slow.add(contributor, now)
                    self._drop(sha256, contributor)

    def _drop(self, sha256: str, contributor: str) -> None:
        copies = self._objects[sha256]
        del copies[contributor]
        if not copies:
            del self._objects[sha256]


@dataclass
class _ObjectSpread:
    at: float
    accounts: set[str] = field(default_factory=set)


class SpreadTimes:
    """The time at which a contributor last got each object; an account counts once per object."""

    def __init__(self) -> None:
        self._objects: dict[str, _ObjectSpread] = {}

    def note(self, sha256: str, contributor: str, now: float) -> None:
        """Record that an account announces an object for the first time."""
        spread = self._objects.setdefault(sha256, _ObjectSpread(now))
        if contributor not in spread.accounts:
            spread.accounts.add(contributor)
            spread.at = now

    def last(self, sha256: str) -> float:
        """Return the monotonic time of the last copy; 0 if nobody has got the object."""
        spread = self._objects.get(sha256)
        return spread.at if spread is not None else 0.0

    def keep(self, wanted: Collection[str]) -> None:
        """Remove the objects that nobody requests."""
        for sha256 in self._objects.keys() - wanted:
            del self._objects[sha256]


class BaseWaits:
    """The total time that each node has waited for files of the base; dropped after an hour without a wait."""

    def __init__(self) -> None:
        self._nodes: OrderedDict[int, tuple[float, float]] = OrderedDict()  # seconds, time of the last wait

    def seconds(self, node: int) -> float:
        """Return the total time that a node has waited, in seconds."""
        return self._nodes.get(node, (0.0, 0.0))[0]

    def add(self, node: int, seconds: float, now: float) -> None:
        """Add to a node's waiting time."""
        before, _ = self._nodes.pop(node, (0.0, 0.0))
        self._nodes[node] = before + seconds, now
        while len(self._nodes) > _MAX_SEARCHES:
            self._nodes.popitem(last=False)

    def expire(self, now: float) -> None:
        """Remove nodes without a recent wait."""
        while self._nodes and next(iter(self._nodes.values()))[1] + MARK_SECONDS <= now:
            self._nodes.popitem(last=False)


def _decrease(counts: Counter[str], key: str) -> None:
    counts[key] -= 1
    if not counts[key]:
        del counts[key]
