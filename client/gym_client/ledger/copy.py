"""A contributor's copy of a hub's ledger, downloaded incrementally and stored in the format of an export."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from pathlib import Path
from typing import Any

from gym_client.hub.heads import Heads
from gym_client.hub.replies import read_entry, refused_as_unsigned
from gym_client.hub.transfers import SPARE_BYTES
from gym_client.hub.transport import HubClient, transfer_seconds
from gym_client.identity.home import Home
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.core.files import append_lines, make_folder
from gym_fed.core.text import counted, readable_bytes
from gym_fed.trust.identity.history import REVOKED, History
from gym_fed.trust.identity.variant import SignedVariant
from gym_fed.trust.ledger.entries import Entry, corrupt
from gym_fed.trust.ledger.export import first_line, lines, verify_file
from gym_fed.trust.ledger.heads import SignedHead
from gym_fed.trust.wire.v1 import hub_pb2 as pb

_HINT = "do not use the variant; ask its owner and the hub's coordinator"

Progress = Callable[[int, int], None]
"""Called with the number of downloaded entries and the total."""

_MAX_HEADS = 2_000_000
"""Maximum number of heads of one download, which are held in memory."""

MAX_BYTES = 1 << 30
"""Maximum size in bytes of the entries and heads of one download."""

_LINES_PER_LOOK = 100
_HEAD = b'{"head":'
_SECONDS = transfer_seconds(256 << 20)


class LedgerCopy:
    """The copy of one hub's ledger.

    Args:
        home: The contributor's home.
        public_key: Ledger key of the hub.
    """

    def __init__(self, home: Home, public_key: bytes) -> None:
        self._home = home
        self._key = public_key
        self.heads = Heads(home, public_key)

    @property
    def path(self) -> Path:
        return self.heads.path.with_name("ledger.jsonl")

    def size(self) -> int:
        """Return the number of entries under the last head, after removing what an interrupted download has left."""
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
                        raise corrupt(f"{self.path} was changed; delete it to download it again") from error
            file.truncate(end)
        return size

    def sync(self, client: HubClient, progress: Progress = lambda done, total: None) -> SignedHead:
        """Download the missing entries, up to the newest one.

        Returns:
            The head that covers all entries, checked against every earlier head.

        Raises:
            GymError: ``SIGNATURE_INVALID``, ``LEDGER_FORKED``, and errors from the transport.
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
        heads = _heads(client, size + 1, head.size)
        is_new = not self.path.exists() or not self.path.stat().st_size
        first = [first_line(self._key)] if is_new else []
        entries: Iterable[Entry] | None = None
        if client.mirrors is not None:
            entries = client.mirrors.entries(size + 1, head.size, head.head.hash)
        if entries is None:
            entries = _entries(client, size + 1, head.size, progress)
        append_lines(self.path, chain(first, _with_room(lines(entries, heads), self.path.parent)))


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
                    f"the hub sends entry {entry.sequence} instead of {expected}",
                )
            yield entry
            progress(expected, last)
            expected += 1
    call.cancel()
    if expected <= last:
        raise GymError(
            ErrorCode.SIGNATURE_INVALID,
            f"the hub signed {counted(last, 'entry')} but sends {expected - 1}",
            "the hub withholds entries that it signed; show your heads to the other contributors",
        )


def _with_room(lines: Iterable[str], folder: Path) -> Iterator[str]:
    """Pass on at most ``MAX_BYTES`` of lines, and only while the disk keeps ``SPARE_BYTES`` free.

    A hub may sign a ledger of any size, and send entries without end.
    """
    num_bytes = 0
    for number, line in enumerate(lines):
        num_bytes += len(line.encode())
        if num_bytes > MAX_BYTES:
            raise GymError(
                ErrorCode.TOO_LARGE,
                f"the hub sends more than {readable_bytes(MAX_BYTES)} of ledger entries at once",
                "if its ledger is so large, repeat the command: it continues after the last signed head",
            )
        if number % _LINES_PER_LOOK == 0 and (free := shutil.disk_usage(folder).free) < SPARE_BYTES:
            raise GymError(
                ErrorCode.DISK_FULL,
                f"the hub's ledger does not fit in {folder}: {readable_bytes(free)} are free, of which "
                f"{readable_bytes(SPARE_BYTES)} must stay free",
                "free some space, or use a home on another disk with --home",
            )
        yield line


def _heads(client: HubClient, first: int, last: int) -> list[SignedHead]:
    """Request the heads of sizes ``first`` to ``last``, which must arrive in order, each once."""
    call = client.stream("LedgerHeads", pb.LedgerHeadsRequest(from_size=first), _SECONDS)
    heads: list[SignedHead] = []
    try:
        with client.errors(), refused_as_unsigned():
            for message in call:
                head = SignedHead.from_json(message.head_json)
                if head.size > last:
                    break
                if head.size < first or len(heads) == _MAX_HEADS:
                    raise GymError(
                        ErrorCode.SIGNATURE_INVALID,
                        f"the hub sends a head of {counted(head.size, 'entry')} out of order",
                    )
                heads.append(head)
                first = head.size + 1
    finally:
        call.cancel()
    return heads


def check_variant(
    client: HubClient, signed: SignedVariant, progress: Callable[[int, int], None] = lambda done, total: None
) -> int:
    """Update and verify the copy of the ledger, and check a variant against it.

    Returns:
        Sequence number of the entry that records the variant.

    Raises:
        GymError: ``SIGNATURE_INVALID`` if the ledger does not record that the owner pushed it with this key;
            ``KEY_REVOKED``; ``STALE`` if there is a newer revision; errors from the verification of the ledger.
    """
    client.status()
    key = bytes.fromhex(client.pin.ledger_key)
    copy = LedgerCopy(client.home, key)
    copy.sync(client, progress)
    record = LedgerVariant(client.pin.server, signed)
    verify_file(copy.path, key, record)
    return record.checked()


class LedgerVariant:
    """Ledger visitor that collects the entries of one variant.

    Args:
        server: Id of the hub.
        signed: The variant.
        history: A key history that the caller updates, for checking many variants in one pass; None for a separate one.
    """

    def __init__(self, server: str, signed: SignedVariant, history: History | None = None) -> None:
        self._history, self._fills = history or History(server), history is None
        self._signed = signed
        self._digest = signed.digest
        self._slot = ""
        self._at = 0
        self._later = 0
        self._was_owners = False

    def __call__(self, entry: Entry, body: dict[str, Any]) -> None:
        """Process the next entry."""
        if self._fills:
            self._history.add(entry.kind, body)
        owner = self._signed.manifest.owner
        if entry.kind not in ("variant", "variant-removed") or body["contributor"] != owner:
            return
        if entry.kind == "variant" and body["document"] == self._digest:
            self._slot, self._at = body["variant"], entry.sequence
            self._was_owners = self._history.current(owner) == self._signed.public_key
        elif body["variant"] == self._slot:
            self._later = entry.sequence

    def checked(self) -> int:
        """Return the sequence number of the variant's entry; raises the errors of ``check_variant``."""
        manifest = self._signed.manifest
        description = f"variant {manifest.variant} of {manifest.owner}"
        if not self._at:
            raise GymError(
                ErrorCode.SIGNATURE_INVALID,
                f"the hub's ledger does not record {description} as signed",
                _HINT,
            )
        if not self._was_owners:
            raise GymError(
                ErrorCode.SIGNATURE_INVALID,
                f"{description} is signed by a key that was not the owner's at entry {self._at} of the hub's ledger",
                _HINT,
            )
        if self._history.keys[self._signed.public_key.hex()].status == REVOKED:
            raise GymError(
                ErrorCode.KEY_REVOKED,
                f"the key that signed {description} was revoked",
                "its owner can push it again, signed by the new key",
            )
        if self._later:
            raise GymError(
                ErrorCode.STALE,
                f"{description}, revision {manifest.revision}, was replaced or removed by entry {self._later}",
                "pull it again",
            )
        return self._at
