"""A contributor's own copy of a hub's ledger: downloaded from where it ended last time, in the format of an export."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import chain
from pathlib import Path

from gym_client.hub.head_file import read_entry, refused_as_unsigned
from gym_client.hub.heads import Heads
from gym_client.hub.transport import HubClient, transfer_seconds
from gym_client.identity.home import Home
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.core.files import append_lines, make_folder
from gym_fed.core.text import counted
from gym_fed.trust.ledger.entries import Entry, corrupt
from gym_fed.trust.ledger.export import first_line, lines
from gym_fed.trust.ledger.heads import SignedHead
from gym_fed.trust.wire.v1 import hub_pb2 as pb

Progress = Callable[[int, int], None]
"""Called with how many entries are there, and how many there will be."""

_HEAD = b'{"head":'
_SECONDS = transfer_seconds(256 << 20)


class LedgerCopy:
    """The copy of one hub's ledger.

    Args:
        home: The contributor's folder.
        public_key: Of the hub.
    """

    def __init__(self, home: Home, public_key: bytes) -> None:
        self._home = home
        self._key = public_key
        self.heads = Heads(home, public_key)

    @property
    def path(self) -> Path:
        return self.heads.path.with_name("ledger.jsonl")

    def size(self) -> int:
        """How many entries are there under a head; what a broken download left behind the last head is cut off."""
        if not self.path.exists():
            return 0
        end, size = 0, 0
        with self.path.open("r+b") as file:
            at = 0
            for line in file:
                at += len(line)
                if line.startswith(_HEAD) and line.endswith(b"\n"):
                    try:
                        size, end = SignedHead.from_json(line[:-1].decode("utf-8")).size, at
                    except (GymError, UnicodeDecodeError) as error:
                        raise corrupt(f"{self.path} was changed; delete it to download it anew") from error
            file.truncate(end)
        return size

    def sync(self, client: HubClient, progress: Progress = lambda done, total: None) -> SignedHead:
        """Download what is missing, up to the newest entry.

        Returns:
            The head over all of it, checked against every head that was seen before.

        Raises:
            GymError: ``SIGNATURE_INVALID``, ``LEDGER_FORKED``, and what the transport raises.
        """
        size = self.size()
        newest = self.heads.newest()
        head = client.prove(max(1, size, newest.size if newest else 0)).head
        self.heads.see(head, client.prove, is_newest=True, statements=client.statements)
        if head.size > size:
            self._append(client, size, head, progress)
        return head

    def _append(self, client: HubClient, size: int, head: SignedHead, progress: Progress) -> None:
        make_folder(self.path.parent)
        heads = [h for h in _heads(client, size + 1) if h.size <= head.size]
        is_new = not self.path.exists() or not self.path.stat().st_size
        first = [first_line(self._key)] if is_new else []
        entries = _entries(client, size + 1, head.size, progress)
        append_lines(self.path, chain(first, lines(entries, heads)))


def _entries(client: HubClient, first: int, last: int, progress: Progress) -> Iterator[Entry]:
    call = client.stream("Ledger", pb.LedgerRequest(from_sequence=first), _SECONDS)
    expected = first
    with client.errors():
        for message in call:
            if expected > last:
                break
            entry = read_entry(message)
            if entry.sequence != expected:
                raise GymError(
                    ErrorCode.SIGNATURE_INVALID,
                    f"the hub sends entry {entry.sequence} in place of {expected}",
                )
            yield entry
            progress(expected, last)
            expected += 1
    call.cancel()
    if expected <= last:
        raise GymError(
            ErrorCode.SIGNATURE_INVALID,
            f"the hub signed {counted(last, 'entry')} and sends {expected - 1}",
            "it keeps back what it signed; show your heads to the other contributors",
        )


def _heads(client: HubClient, from_size: int) -> list[SignedHead]:
    call = client.stream("LedgerHeads", pb.LedgerHeadsRequest(from_size=from_size), _SECONDS)
    with client.errors(), refused_as_unsigned():
        return [SignedHead.from_json(message.head_json) for message in call]
