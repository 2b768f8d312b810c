"""What `gym-server rewards` shows: who has earned what, with which standing, and what the last update was worth."""

from __future__ import annotations

from typing import Any

from rich.table import Column
from sqlalchemy import select

from gym_fed.tables import TextTable, short_ids
from gym_server.federation import Federation
from gym_server.rewards.standing import rewards_of
from gym_server.store.tables import accounts, updates


def rewards_shown(fed: Federation) -> dict[str, Any]:
    """The policy, and every contributor that ever sent an update or has an account."""
    config = fed.config.rewards
    with fed.database.reading() as tx:
        names = {row.contributor: row.name for row in tx.execute(select(accounts))}
        sent = tx.scalars(select(updates.c.contributor).distinct()).all()
        people = sorted({*names, *sent})
        told = {who: rewards_of(tx, who, config.reputation) for who in people}
        balances = {who: fed.payouts.purse(tx, who) for who in people}
    quality, participation = config.weights
    return {
        "pool": config.pool,
        "score": config.score,
        "quality_weight": quality,
        "participation_weight": participation,
        "contributors": [
            {"contributor": who, "name": names.get(who, ""), **balances[who], **told[who]} for who in people
        ],
    }


def rewards_table(found: dict[str, Any], wide: bool = False) -> TextTable:
    """What ``rewards_shown`` found, for people; ids by how they begin, unless ``wide``."""
    title = (
        f"{found['pool']} credits a round: {found['quality_weight']:.0%} by {found['score']}, "
        f"{found['participation_weight']:.0%} for taking part"
        if found["quality_weight"]
        else f"{found['pool']} credits a round, for taking part"
    )
    who = Column("contributor", no_wrap=True)
    ids = [one["contributor"] for one in found["contributors"]]
    shown = dict(zip(ids, ids, strict=True)) if wide else short_ids(ids)
    columns = ("name", "credits", "reputation", "last scores", "last verdict")
    table = TextTable(who, *columns, title=title)
    for one in found["contributors"]:
        scores = [f"{r['score']:+.4f}" for r in one["rounds"] if r["score"] is not None][:3]
        last = one["rounds"][0] if one["rounds"] else None
        table.add_row(
            shown[one["contributor"]],
            one["name"] if one["name"] != one["contributor"] else "",
            str(one["balance"]),
            f"{one['reputation']:.3f}",
            ", ".join(scores) or "-",
            "-" if last is None else f"{last['verdict']} {last['reason']}".strip(),
        )
    return table
