"""Handle hubs that were restored from a backup: report the contributor's loss, and accept the restore."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, TypeVar

from gym_client.hub.heads import Heads
from gym_client.identity.home import Home
from gym_client.ledger.receipts import kept_receipts, sequence_of
from gym_fed.core.errors import GymError
from gym_fed.core.text import counted
from gym_fed.trust.ledger.restored import HubRestored, SignedRestored

T = TypeVar("T")
MAX_RESTORES = 100
"""Maximum number of restores accepted in one command."""


@dataclass(frozen=True)
class Loss:
    """What a contributor loses through a restore.

    Attributes:
        server: Id of the hub.
        restored_at_entry: Sequence number of the last valid entry in the hub's ledger.
        at: Time of the statement in Unix seconds.
        reason: The coordinator's explanation.
        lost_entries: Number of lost entries; None if the coordinator does not know it.
        receipts: Number of stored receipts that are no longer valid.
        rounds: Rounds of these receipts, in order.
        credits: Credits in these receipts.
    """

    server: str
    restored_at_entry: int
    at: int
    reason: str
    lost_entries: int | None
    receipts: int
    rounds: tuple[int, ...]
    credits: int

    def to_dict(self) -> dict[str, Any]:
        return {**vars(self), "rounds": list(self.rounds)}

    def lines(self) -> list[str]:
        """Describe the loss, one line each."""
        when = datetime.fromtimestamp(min(self.at, 2**40), UTC).strftime("%Y-%m-%d %H:%M UTC")
        lines = [
            f"The hub {self.server} was restored from a backup at entry {self.restored_at_entry} of its ledger, "
            f"according to its statement of {when}: {self.reason!r}."
        ]
        if self.rounds:
            first, last = self.rounds[0], self.rounds[-1]
            which = f"round {first}" if first == last else f"rounds {first} to {last}"
            lines.append(
                f"You took part in {which}; all entries after entry {self.restored_at_entry} are lost."
            )
        lines.append(
            f"No longer valid, but kept as evidence: {counted(self.receipts, 'receipt')} for "
            f"{counted(self.credits, 'credit')}."
        )
        return lines


def loss_of(home: Home, signed: SignedRestored) -> Loss:
    """Compute what a restore costs, from the home's receipts."""
    statement = signed.statement
    gone = [
        receipt
        for receipt in kept_receipts(home, statement.server)
        if (sequence_of(receipt) or 0) > statement.restored_at_entry
    ]
    entries = {r["proof"]["entry"]["sequence"]: r["proof"]["entry"] for r in gone if "proof" in r}
    bodies = [(entry["kind"], entry["body"]) for entry in entries.values()]
    rounds = {body["server_round"] for _, body in bodies if isinstance(body.get("server_round"), int)}
    lost = statement.lost_head
    return Loss(
        statement.server,
        statement.restored_at_entry,
        statement.at,
        statement.reason,
        None if lost is None else lost.size - statement.restored_at_entry,
        len(gone),
        tuple(sorted(rounds)),
        sum(int(body["amount"]) for kind, body in bodies if kind == "credit"),
    )


def accept_restore(home: Home, key: bytes, signed: SignedRestored) -> int:
    """Accept a restore: mark superseded receipts and heads, and move the copy of the ledger aside.

    Safe to repeat after a crash: the line in the file of heads, which completes the restore, is written last.

    Args:
        home: The contributor's home, locked by the caller.
        key: Ledger key of the hub.
        signed: The signed statement.

    Returns:
        The number of superseded heads.

    Raises:
        GymError: ``STATE_CORRUPT`` if the hub did not sign the statement.
    """
    signed.verify(key)
    heads = Heads(home, key)
    home.append_receipt({"server": heads.server, "restored": signed.to_dict()})
    copy = heads.path.with_name("ledger.jsonl")
    if copy.exists():
        os.replace(copy, copy.with_name(f"ledger-before-restore-{signed.statement.at}.jsonl"))
    return heads.accept(signed)


def with_restores(
    home: Home, key: Callable[[], bytes], agrees: Callable[[Loss], bool], action: Callable[[], T]
) -> T:
    """Run an action. If it fails because the hub was restored, ask for consent and repeat it.

    Args:
        home: The contributor's home, locked by the caller.
        key: Returns the hub's ledger key; called only if needed.
        agrees: Prompts the user.
        action: Function to run; must be safe to repeat.

    Raises:
        GymError: ``HUB_RESTORED`` if the user does not agree; errors from ``action``.
    """
    for _ in range(MAX_RESTORES):
        try:
            return action()
        except HubRestored as error:
            if not agrees(loss_of(home, error.signed)):
                raise GymError(
                    error.code,
                    error.message,
                    "pass --accept-restore, or: gym-client ledger restored --accept",
                ) from error
            accept_restore(home, key(), error.signed)
    return action()
