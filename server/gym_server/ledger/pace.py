"""Limits on the ledger's growth: a rate limit on entries per account, and one entry for repeated refusals.

The rate is computed from the ledger itself, so it survives restarts and needs no memory. Anyone who can log in can send
any number of forgeries. A contributor's first one in a round gets its own entry; the others are counted in one entry of
kind ``refused-summary`` at the end of the round.
"""

from __future__ import annotations

import json
from collections.abc import Collection

from sqlalchemy import Connection, select

from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.core.text import counted
from gym_server.ledger.chain import Ledger
from gym_server.store.database import put_setting
from gym_server.store.tables import ledger, ledger_subjects, settings

HOUR_SECONDS = 3600
SUMMARY = "refused-summary"
_PREFIX = "refused:"


def require_pace(
    tx: Connection, contributor: str, kinds: Collection[str], most: int, now: float, what: str
) -> None:
    """Check that an account is within the rate limit of the given kinds of entries, which only it can cause.

    Args:
        tx: The caller's transaction.
        contributor: Account whose entries are counted.
        kinds: Kinds of the entries; they share one limit.
        most: Maximum number of entries per hour.
        now: Current time, Unix seconds.
        what: The repeated action, for the message, such as ``changed its variants``.

    Raises:
        GymError: ``BUSY`` with the minutes to wait.
    """
    recorded = (
        select(ledger.c.body)
        .join(ledger_subjects, ledger_subjects.c.sequence == ledger.c.sequence)
        .where(ledger_subjects.c.contributor == contributor, ledger.c.kind.in_(kinds))
        .order_by(ledger.c.sequence.desc())
    )
    earliest = tx.scalar(recorded.offset(most - 1).limit(1))
    if earliest is None:
        return
    wait = json.loads(earliest)["at"] + HOUR_SECONDS - now
    if wait > 0:
        raise GymError(
            ErrorCode.BUSY,
            f"{contributor} {what} {counted(most, 'time')} within an hour",
            f"try again in {counted(round(wait / 60), 'minute')}",
        )


def count_refusal(tx: Connection, contributor: str, server_round: int, code: ErrorCode) -> int:
    """Count a refusal; return the contributor's refusals in the round, including this one."""
    key = f"{_PREFIX}{server_round}:{contributor}"
    text = tx.scalar(select(settings.c.value).where(settings.c.key == key))
    counts: dict[str, int] = json.loads(text) if text else {}
    counts[code.value] = counts.get(code.value, 0) + 1
    put_setting(tx, key, json.dumps(counts))
    return sum(counts.values())


def summarise_refusals(tx: Connection, ledger: Ledger, server_round: int) -> None:
    """Append one entry for all refusals of a round after the first ones; called at the end of the round."""
    found: dict[str, dict[str, int]] = {}
    for row in tx.execute(select(settings).where(settings.c.key.startswith(_PREFIX))).all():
        number, _, contributor = row.key.removeprefix(_PREFIX).partition(":")
        if int(number) > server_round:
            continue
        tx.execute(settings.delete().where(settings.c.key == row.key))
        counts = json.loads(row.value)
        if sum(counts.values()) > 1:
            refused = found.setdefault(contributor, {})
            for code, times in counts.items():
                refused[code] = refused.get(code, 0) + times
    if found and ledger.private:
        found = {
            who: {ErrorCode.UPDATE_REFUSED.value: sum(refused.values())} for who, refused in found.items()
        }
    if found:
        ledger.append(tx, SUMMARY, {"server_round": server_round, "refused": found})
