"""Refusals of what is not authentic: counted as they come, one entry of the ledger for all of them at a round's end.

Whoever can log in can send forgeries without end, and an entry is for ever. So the first of a contributor in a round
has an entry of its own, and the others are a number in one entry of kind ``refused-summary``.
"""

from __future__ import annotations

import json

from sqlalchemy import Connection, select

from gym_fed.errors import ErrorCode
from gym_server.ledger.chain import Ledger
from gym_server.store.database import put_setting
from gym_server.store.tables import settings

SUMMARY = "refused-summary"
_PREFIX = "refused:"


def count(tx: Connection, contributor: str, server_round: int, code: ErrorCode) -> int:
    """Count a refusal; gives how many the contributor has in the round, with this one."""
    key = f"{_PREFIX}{server_round}:{contributor}"
    text = tx.scalar(select(settings.c.value).where(settings.c.key == key))
    counts: dict[str, int] = json.loads(text) if text else {}
    counts[code.value] = counts.get(code.value, 0) + 1
    put_setting(tx, key, json.dumps(counts))
    return sum(counts.values())


def summarise(tx: Connection, ledger: Ledger, server_round: int) -> None:
    """At the end of a round: one entry for all that were counted in it and before, where there were more than one."""
    found: dict[str, dict[str, int]] = {}
    for row in tx.execute(select(settings).where(settings.c.key.startswith(_PREFIX))).all():
        number, _, contributor = row.key.removeprefix(_PREFIX).partition(":")
        if int(number) > server_round:
            continue
        tx.execute(settings.delete().where(settings.c.key == row.key))
        counts = json.loads(row.value)
        if sum(counts.values()) > 1:
            told = found.setdefault(contributor, {})
            for code, times in counts.items():
                told[code] = told.get(code, 0) + times
    if found and ledger.private:
        found = {who: {ErrorCode.UPDATE_REFUSED.value: sum(told.values())} for who, told in found.items()}
    if found:
        ledger.append(tx, SUMMARY, {"server_round": server_round, "refused": found})
