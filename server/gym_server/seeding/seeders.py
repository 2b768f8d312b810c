"""The seeders of a hub, and the failures that contributors report about them."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Any

MARK_SECONDS = 3600.0
"""How long a report counts and an account stays marked, in seconds."""
_MAX_ACCOUNTS = 20_000
_BAD_REPORTS = 2
"""Number of contributors whose reports remove a seeder from the list."""
_MAX_REPORTS = 3
"""Maximum number of counted reports per contributor within ``MARK_SECONDS``."""
_MANY_REPORTS = 3
"""Number of reports after which a contributor who reports most of its seeders is ignored."""


@dataclass(eq=False)
class Seeder:
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


class SeederList:
    """An index of seeders by node, object and name, with one entry per node."""

    def __init__(self) -> None:
        self._nodes: dict[int, Seeder] = {}
        self._names: dict[str, int] = {}
        self._objects: dict[str, dict[int, Seeder]] = {}

    def __len__(self) -> int:
        return len(self._nodes)

    def __contains__(self, node: int) -> bool:
        return node in self._nodes

    def get(self, node: int) -> Seeder | None:
        """Return the seeder of a node."""
        return self._nodes.get(node)

    def values(self) -> Collection[Seeder]:
        """Return all seeders."""
        return self._nodes.values()

    def node_of(self, name: str) -> int | None:
        """Return the node that announced the key with this fingerprint."""
        return self._names.get(name)

    def named(self, name: str) -> Seeder | None:
        """Return the seeder whose key has this fingerprint."""
        return self._nodes.get(self._names.get(name, -1))

    def having(self, sha256: str) -> Iterable[tuple[int, Seeder]]:
        """Return the seeders of an object, with their nodes."""
        return self._objects.get(sha256, {}).items()

    def put(self, node: int, seeder: Seeder) -> None:
        """Add a seeder, replacing the node's previous one."""
        self.drop(node)
        self._nodes[node], self._names[seeder.name] = seeder, node
        for sha256 in seeder.objects:
            self._objects.setdefault(sha256, {})[node] = seeder

    def drop(self, node: int) -> None:
        """Remove the seeder of a node, if there is one."""
        if (seeder := self._nodes.pop(node, None)) is None:
            return
        self._names.pop(seeder.name, None)
        for sha256 in seeder.objects:
            nodes = self._objects[sha256]
            del nodes[node]
            if not nodes:
                del self._objects[sha256]

    def expire(self, now: float) -> None:
        """Remove the seeders whose announcements have expired."""
        for node in [node for node, seeder in self._nodes.items() if seeder.expires <= now]:
            self.drop(node)


class AccountMarks:
    """A set of accounts that are marked for ``MARK_SECONDS``; beyond a maximum, the oldest marks are dropped."""

    def __init__(self) -> None:
        self._until: OrderedDict[str, float] = OrderedDict()

    def add(self, contributor: str, now: float) -> None:
        """Mark an account."""
        self._until[contributor] = now + MARK_SECONDS
        _trim(self._until)

    def has(self, contributor: str, now: float) -> bool:
        """Return True if an account is marked."""
        return self._until.get(contributor, now) > now


class SeederReports:
    """Reports about accounts whose seeders failed; ``banned`` contains accounts that several contributors reported."""

    def __init__(self) -> None:
        self.banned = AccountMarks()
        self._reports: OrderedDict[str, dict[str, float]] = (
            OrderedDict()
        )  # times by account, then by reporter
        self._given: OrderedDict[str, tuple[int, int]] = OrderedDict()  # tickets and reports by reporter
        self._counted: OrderedDict[str, list[float]] = OrderedDict()  # times of counted reports by reporter

    def note_ticket(self, reporter: str) -> None:
        """Count a ticket that a contributor received."""
        self._count(reporter, 1, 0)

    def add(self, reporter: str, account: str, now: float) -> None:
        """Record that an account's seeder failed.

        Reports by contributors who report most of their seeders, or who have already sent ``_MAX_REPORTS``, are
        ignored.
        """
        tickets, reports = self._count(reporter, 0, 1)
        if reporter == account or (reports >= _MANY_REPORTS and 2 * reports > tickets):
            return
        counted = [at for at in self._counted.pop(reporter, []) if at + MARK_SECONDS > now]
        is_counted = len(counted) < _MAX_REPORTS
        self._counted[reporter] = [*counted, now] if is_counted else counted
        _trim(self._counted)
        if not is_counted:
            return
        known = self._reports.pop(account, {})
        recent = {who: at for who, at in known.items() if at + MARK_SECONDS > now} | {reporter: now}
        if len(recent) >= _BAD_REPORTS:
            self.banned.add(account, now)
            return
        self._reports[account] = recent
        _trim(self._reports)

    def _count(self, reporter: str, tickets: int, reports: int) -> tuple[int, int]:
        before = self._given.pop(reporter, (0, 0))
        after = self._given[reporter] = before[0] + tickets, before[1] + reports
        _trim(self._given)
        return after


def _trim(accounts: OrderedDict[str, Any]) -> None:
    while len(accounts) > _MAX_ACCOUNTS:
        accounts.popitem(last=False)
