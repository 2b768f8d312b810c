"""An entry of the ledger as the hub sends it."""

from __future__ import annotations

from gym_fed.ledger.entries import Entry
from gym_fed.wire.v1 import hub_pb2 as pb


def entry_message(entry: Entry) -> pb.LedgerEntry:
    """The entry, its body as the text that was hashed."""
    return pb.LedgerEntry(
        sequence=entry.sequence,
        kind=entry.kind,
        body_json=entry.body_json,
        previous_hash=entry.previous_hash,
        hash=entry.hash,
    )
