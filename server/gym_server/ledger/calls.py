"""The ledger's calls of `hub.proto`: entries, signed heads, and proofs of what is under a head."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

from gym_fed.ledger.entries import Entry
from gym_fed.wire.v1 import hub_pb2 as pb
from gym_server.ledger.chain import Ledger

_LAST = 2**63 - 1


class LedgerCalls:
    """A part of the hub's service."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger

    async def Ledger(self, request: pb.LedgerRequest, context: Any) -> AsyncIterator[pb.LedgerEntry]:
        entries = self._ledger.entries(_position(max(1, request.from_sequence)))
        while (entry := await asyncio.to_thread(next, entries, None)) is not None:
            yield entry_message(entry)

    async def LedgerHeads(self, request: pb.LedgerHeadsRequest, context: Any) -> AsyncIterator[pb.LedgerHead]:
        heads = self._ledger.heads(_position(max(1, request.from_size)))
        while (head := await asyncio.to_thread(next, heads, None)) is not None:
            yield pb.LedgerHead(head_json=head.to_json())

    async def LedgerProof(self, request: pb.LedgerProofRequest, context: Any) -> pb.LedgerProofReply:
        proof = await asyncio.to_thread(
            self._ledger.proof, _position(request.sequence), _position(request.size)
        )
        entry, head = entry_message(proof.entry), proof.head.to_json()
        return pb.LedgerProofReply(entry=entry, head_json=head, path=proof.path)


def _position(number: int) -> int:
    """A number of the wire that databases can be asked for; no ledger is so long."""
    return min(number, _LAST)


def entry_message(entry: Entry) -> pb.LedgerEntry:
    """An entry as it is sent: its body as the text that was hashed."""
    return pb.LedgerEntry(
        sequence=entry.sequence,
        kind=entry.kind,
        body_json=entry.body_json,
        previous_hash=entry.previous_hash,
        hash=entry.hash,
    )
