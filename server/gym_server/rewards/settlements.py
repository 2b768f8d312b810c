"""Settle provisional pay, which new contributors get before the hub can tell which of them share data.

The cosines of one round cannot show that several keys train on the same data; a comparison with each contributor's
previous update can. A contributor is new until the first comparison, or until it is paid as one with others. Scores of
new contributors are not paid yet (``split``), and their participation pay is provisional. If several new contributors
are then paid as one, they owe what they got beyond one contributor's pay. If the group includes a known contributor,
they owe all of it. The debt is withheld from their later participation pay and goes to the others.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection, select

from gym_fed.soup.credit import split_pool
from gym_server.store.tables import settlements


@dataclass(frozen=True)
class Settlement:
    """The provisional pay and the debt of one contributor.

    Attributes:
        provisional: Participation pay before the first comparison, in credits; None after it, and for contributors who
            were paid as one.
        owed: Credits to withhold from later participation pay.
    """

    provisional: int | None = 0
    owed: int = 0


def settle(
    before: Mapping[str, Settlement],
    compared: Collection[str],
    groups: Collection[Collection[str]],
    earned: Mapping[str, int],
) -> tuple[dict[str, int], dict[str, Settlement]]:
    """Charge linked contributors for provisional pay beyond one contributor's, and withhold what they owe.

    Args:
        before: Settlements before the round, by contributor; others have none.
        compared: Contributors whose update was compared with previous updates, including their own.
        groups: Disjoint groups of contributors that were paid as one in the round: linked, or with the same work.
        earned: Participation pay of the round, in credits, by contributor.

    Returns:
        The credits after withholding, with the same total, and the settlements after the round.
    """
    state = {who: before.get(who, Settlement()) for who in earned}
    owed = {who: one.owed for who, one in state.items()}
    for group in groups:
        fresh = {who: p for who in group if (p := state[who].provisional) is not None}
        all_new = len(fresh) == len(group)
        surplus = sum(fresh.values()) - (max(fresh.values()) if all_new else 0)
        for who, part in split_pool(surplus, {who: float(amount) for who, amount in fresh.items()}).items():
            owed[who] += part
    credits, owed = _withheld(earned, owed)
    as_one = {who for group in groups for who in group}
    after = {}
    for who, one in state.items():
        provisional = one.provisional
        if who in compared or who in as_one:
            provisional = None
        elif provisional is not None:
            provisional += earned[who]
        after[who] = Settlement(provisional, owed[who])
    return credits, after


def _withheld(earned: Mapping[str, int], owed: Mapping[str, int]) -> tuple[dict[str, int], dict[str, int]]:
    """Return credits and debts after debtors have paid the others, in proportion to the others' credits."""
    others = {who: float(amount) for who, amount in earned.items() if amount and not owed[who]}
    if not others:
        return dict(earned), dict(owed)
    paid = {who: min(amount, owed[who]) for who, amount in earned.items()}
    shared = split_pool(sum(paid.values()), others)
    credits = {who: amount - paid[who] + shared.get(who, 0) for who, amount in earned.items()}
    return credits, {who: owed[who] - paid[who] for who in owed}


def settlements_before(tx: Connection, contributors: Collection[str]) -> dict[str, Settlement]:
    """Read the settlements of contributors; those without a merged update have none."""
    rows = tx.execute(select(settlements).where(settlements.c.contributor.in_(set(contributors))))
    return {row.contributor: Settlement(row.provisional, row.owed) for row in rows}


def write_settlements(tx: Connection, found: Mapping[str, Settlement]) -> None:
    """Replace the settlements of contributors."""
    tx.execute(settlements.delete().where(settlements.c.contributor.in_(found)))
    for who, one in found.items():
        tx.execute(settlements.insert().values(contributor=who, provisional=one.provisional, owed=one.owed))


def recorded_settlements(found: Mapping[str, Settlement]) -> dict[str, dict[str, Any]]:
    """Return the ledger's record of settlements."""
    return {who: {"provisional": one.provisional, "owed": one.owed} for who, one in found.items()}
