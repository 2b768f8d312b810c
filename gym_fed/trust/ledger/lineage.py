"""Verify the lineage of versions in a ledger: each follows the current one, and rollbacks restore an earlier one.

A ``version`` entry contains ``parent``, ``soup``, ``digest`` and ``height``. The height counts all versions ever
created. A ``rolled-back`` entry contains the current version (``from``) and the restored one (``to``), which becomes
the parent of the next version. Entries are never changed, so abandoned versions remain readable.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gym_fed.config.hub.task import next_digest
from gym_fed.core.text import counted
from gym_fed.trust.ledger.entries import Entry, corrupt

VERSION, ROLLED_BACK = "version", "rolled-back"


class LineageCheck:
    """Tracks the current version through all entries of a ledger.

    Attributes:
        current: Digest of the current version; None until the first entry that contains a version.
    """

    def __init__(self) -> None:
        self.current: str | None = None
        self._digests: dict[int, str] = {}

    def add(self, entry: Entry, body: Mapping[str, Any]) -> None:
        """Process the next entry.

        Raises:
            GymError: ``STATE_CORRUPT`` for a version that does not follow the current one, for a rollback from a
                version that is not current, or to one that does not exist.
        """
        if entry.kind not in (VERSION, ROLLED_BACK):
            return
        try:
            if entry.kind == VERSION:
                self._made(entry, body)
            else:
                self._rolled_back(entry, body)
        except (KeyError, TypeError, ValueError) as error:
            raise corrupt(f"entry {entry.sequence} ({entry.kind}) is malformed: {error!r:.80}") from error

    def _made(self, entry: Entry, body: Mapping[str, Any]) -> None:
        parent, digest, height = body["parent"], body["digest"], body["height"]
        self._check_parent(entry, parent, body)
        self._digests[height] = self.current = digest

    def _check_parent(self, entry: Entry, parent: str, body: Mapping[str, Any]) -> None:
        where, height = f"entry {entry.sequence}: version {body['height']}", body["height"]
        if self.current is None:
            self._digests.setdefault(0, parent)
        elif parent != self.current:
            raise corrupt(f"{where} does not follow from the current version {self.current}")
        integers = body["integers"]["digest"] if "integers" in body else None
        if next_digest(parent, body["soup"], body["server_round"], integers) != body["digest"]:
            raise corrupt(f"{where} is not the result of its parent and its soup")
        if height != max(self._digests, default=0) + 1:
            raise corrupt(f"{where} does not follow {counted(max(self._digests, default=0), 'other')}")

    def _rolled_back(self, entry: Entry, body: Mapping[str, Any]) -> None:
        where, to = f"entry {entry.sequence}: a rollback", body["to"]
        if body["from"] != self.current or body["newest_height"] != max(self._digests):
            raise corrupt(f"{where} from a version other than the current one")
        if self._digests.get(body["to_height"]) != to:
            raise corrupt(f"{where} to a version that does not exist")
        self.current = to
