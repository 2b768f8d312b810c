"""Find the objects that a hub still needs; the running hub and `gym-server gc` delete all others.

A hub needs the objects that a version, the ledger, a variant, an unfinished upload or a message of an open round refers
to. It also needs the delta of each update that was merged, waits for its round, or is compared with later updates.
Refused and rejected updates, replaced variants and unused uploads are not needed.
"""

from __future__ import annotations

import json
from collections.abc import Iterator

from sqlalchemy import Connection, func, select

from gym_fed.trust.wire.references import references
from gym_fed.trust.wire.v1 import hub_pb2 as pb
from gym_server.store.tables import ledger, messages, rounds, updates, uploads, variants, versions

STALE_ROUNDS = 10
"""Number of rounds for which updates are kept unless refused, since later updates are compared with them."""
_OPEN_STATES = ("queued", "leased", "replied")


def needed(tx: Connection, now: float, stale_rounds: int = STALE_ROUNDS) -> dict[str, str]:
    """Return the sha256 of every object that is still needed, with a description of its use.

    Args:
        tx: A transaction, possibly read-only.
        now: The hub's time, Unix seconds.
        stale_rounds: See ``STALE_ROUNDS``.
    """
    found = dict[str, str]()
    for sha256, what in (*_essential(tx), *_in_use(tx, now, stale_rounds)):
        found.setdefault(sha256, what)
    return found


def essential(tx: Connection) -> dict[str, str]:
    """Return the needed objects without which a version, a replay or a variant would be lost."""
    return dict(_essential(tx))


def _essential(tx: Connection) -> Iterator[tuple[str, str]]:
    for height, sha256 in tx.execute(select(versions.c.height, versions.c.soup_sha256)):
        yield sha256, f"the soup of version {height}"
    merged = select(updates.c.update_id, updates.c.delta_sha256).where(updates.c.verdict == "merged")
    for update_id, sha256 in tx.execute(merged):
        yield sha256, f"merged update {update_id[:12]}"
    for text in tx.scalars(select(ledger.c.body).where(ledger.c.kind == "version")):
        body = json.loads(text)
        if body.get("root"):
            yield body["root"], f"the root update of version {body['height']}"
        if "integers" in body:
            yield body["integers"]["sum"], f"the sum of the soups of version {body['height']}"
    held = select(variants.c.owner, variants.c.name, variants.c.delta_sha256)
    for owner, name, sha256 in tx.execute(held.where(variants.c.document.is_not(None))):
        yield sha256, f"variant {name} of {owner}"


def _in_use(tx: Connection, now: float, stale_rounds: int) -> Iterator[tuple[str, str]]:
    # The limit is in rounds, not updates; otherwise rejected updates could permanently fill an account's quota.
    newest = int(tx.scalar(select(func.max(rounds.c.server_round))) or 0)
    open_or_young = (updates.c.verdict == "admitted") | (
        (updates.c.server_round > newest - stale_rounds) & (updates.c.verdict != "refused")
    )
    for update_id, sha256 in tx.execute(
        select(updates.c.update_id, updates.c.delta_sha256).where(open_or_young)
    ):
        yield sha256, f"update {update_id[:12]}"
    for sha256, contributor in tx.execute(select(uploads.c.sha256, uploads.c.contributor)):
        yield sha256, f"an upload of {contributor}"
    living = messages.c.state.in_(_OPEN_STATES) & (messages.c.created_at + messages.c.ttl_seconds > now)
    for row in tx.execute(select(messages.c.message_id, messages.c.content, messages.c.reply).where(living)):
        records = [pb.Records.FromString(row.content)]
        if row.reply is not None:
            records.append(pb.SubmitRequest.FromString(row.reply).content)
        for record in records:
            for ref in references(record):
                yield ref.sha256, f"message {row.message_id[:12]}"
