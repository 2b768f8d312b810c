"""Find updates that copy merged work of earlier rounds.

The evidence is merged work of another account that was public before the update. The update counts as a copy only if it
is closer to that work than honest work on the same rows is.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from heapq import nlargest
from itertools import chain
from typing import Any

import numpy as np
from sqlalchemy import func, select

from gym_fed.config.hub.server import ServerConfig
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.delta.base import BaseSpec
from gym_fed.delta.file import DeltaFile
from gym_fed.soup.screening import compare
from gym_fed.trust.identity.manifest import UpdateManifest
from gym_server.rounds.round_store import RoundStore
from gym_server.state import HubState
from gym_server.store.database import Database
from gym_server.store.objects import ObjectStore
from gym_server.store.tables import updates, versions

log = logging.getLogger("gym_server")

_IDENTICAL = 1.0 - 1e-6
"""Minimum similarity between an update and a scaled or sign-only copy of it. A second training run does not reach it.
"""

_CLOSER_THAN_CHANCE = 0.5
"""Maximum distance of a copy from the original, relative to that of honest updates on the same rows. With 1, an honest
update would be accused whenever it is the closest one.
"""

_SUSPECTS = 8
"""Maximum number of earlier updates and soups to examine per update, most similar first. Each is compared with the
sender's own work. If that work explains the most similar ones, it also explains the others, which are nearly the same.
"""

_AT_ONCE = 16
"""Number of updates that are compared with a soup at once."""

_MERGED = (
    select(updates, versions.c.committed_at.label("public_since"))
    .join(versions, versions.c.server_round == updates.c.server_round)
    .where(updates.c.verdict == "merged")
)
"""Query of merged updates, with the creation time of their version."""

_OWN_UPDATES = 8
"""Number of an accused account's own newest updates that may explain its similarity to others' work."""


@dataclass(frozen=True)
class FreeRiderFinding:
    """The finding that an update free-rides or duplicates another one.

    Attributes:
        reason: Explanation for the contributor and the ledger.
        cheating: True if cheating is proven; False if the update is only worthless.
        blameless: True if honest work can look the same; the update is then rejected without loss of reputation.
        leader: The update of the same round that this one duplicates; such a finding does not reject the update.
    """

    reason: str
    cheating: bool = True
    blameless: bool = False
    leader: str = ""


@dataclass(frozen=True)
class EarlierWork:
    """A merged update, or the soup, of an earlier round.

    Attributes:
        what: Description for the contributor and the ledger.
        contributors: Its authors.
        soup: True for the soup.
        sha256: Digest of its file.
        base_digest: Digest of the version that it starts from.
        public_since: Creation time of its version, Unix seconds.
    """

    what: str
    contributors: frozenset[str]
    soup: bool
    sha256: str
    base_digest: str
    public_since: float


def stale_work(
    state: HubState, config: ServerConfig, rows: Sequence[Any], files: dict[str, DeltaFile], server_round: int
) -> dict[str, FreeRiderFinding]:
    """Find updates that resend merged work of earlier rounds.

    Rejected work and work of aborted rounds is not evidence, since nobody was paid for it.
    """
    threshold = config.rewards.stale_threshold
    if threshold is None:
        return {}
    earlier = earlier_work(config, state.database, state.round_store, server_round)
    alike: dict[tuple[str, bool], list[tuple[bool, float, EarlierWork]]] = defaultdict(list)
    for old, row, similarity in _to_earlier(state, rows, files, earlier):
        own = row.contributor in old.contributors
        if similarity >= (_IDENTICAL if own else threshold):
            alike[row.update_id, old.soup].append((own, similarity, old))
    found: dict[str, FreeRiderFinding] = {}
    for row in rows:
        updates_and_soups = (alike[row.update_id, is_soup] for is_soup in (False, True))
        closest = (nlargest(_SUSPECTS, some, key=lambda one: one[:2]) for some in updates_and_soups)
        for own, similarity, old in chain(*closest):
            chance = 0.0
            if not own and similarity < _IDENTICAL:
                repeated = _repeated_work(state.base, state.store, row, old, rows, files, earlier)
                chance = max(repeated, _own_work_before(state, row, old))
            if 1.0 - similarity < _CLOSER_THAN_CHANCE * (1.0 - chance):
                reason = f"stale: resends {old.what} (similarity {similarity:.3f})"
                is_unknown = similarity < _IDENTICAL and chance <= 0.0  # no honest work to compare with
                honest = own or is_unknown or _is_independent(row, old)
                found[row.update_id] = FreeRiderFinding(reason, not honest, blameless=honest)
                break
    return found


def _to_earlier(
    state: HubState, rows: Sequence[Any], files: dict[str, DeltaFile], earlier: dict[int, list[EarlierWork]]
) -> Iterator[tuple[EarlierWork, Any, float]]:
    """Yield the similarity of every update to every earlier one and every soup, newest rounds first.

    A soup uses a different codec from updates, so they must be decoded for a comparison, and ``compare`` measures all
    pairs. Comparing a few updates at a time keeps the cost linear in their number.
    """
    for of_round in by_round(earlier):
        for olds, at_once in (
            ([old for old in of_round if not old.soup], max(1, len(rows))),
            ([old for old in of_round if old.soup], _AT_ONCE),
        ):
            with all_opened(state.base, state.store, olds) as opened:
                for start in range(0, len(rows) if opened else 0, at_once):
                    some = rows[start : start + at_once]
                    new = [files[row.update_id] for row in some]
                    alike = compare([*new, *opened.values()], state.base).similarity
                    for i, row in enumerate(some):
                        for j, old in enumerate(opened, start=len(some)):
                            yield old, row, float(alike[i, j])


def _is_independent(row: Any, old: EarlierWork) -> bool:
    """Return True if honest work can resemble the earlier work.

    The update is still rejected, since that work was already paid for.

    In continuous rounds, two contributors with the same rows may train from one version and be merged in different
    rounds.
    """
    is_earlier = (row.committed_at or row.received_at) < old.public_since
    return bool(is_earlier or (not old.soup and old.base_digest == base_of(row)))


def _repeated_work(
    base: BaseSpec,
    store: ObjectStore,
    row: Any,
    old: EarlierWork,
    rows: Sequence[Any],
    files: dict[str, DeltaFile],
    earlier: dict[int, list[EarlierWork]],
) -> float:
    """Return the similarity of honest work on the same rows: the maximum over one author's updates of different rounds.

    The authors are the accounts that sent ``old``, except the accused, who could otherwise raise the threshold by
    repeating its copy. Updates of this round and earlier merged ones are compared. Returns 0 if no author has two
    updates.
    """
    largest = 0.0
    for who in old.contributors - {row.contributor}:
        merged = [one for of_round in earlier.values() for one in of_round if one.contributors == {who}]
        with all_opened(base, store, [one for one in merged if not one.soup]) as opened:
            mine = [files[one.update_id] for one in rows if one.contributor == who]
            mine += opened.values()
            if len(mine) > 1:
                alike = compare(mine, base).similarity
                largest = max(largest, float(np.where(np.eye(len(mine), dtype=bool), 0.0, alike).max()))
    return largest


def _own_work_before(state: HubState, row: Any, old: EarlierWork) -> float:
    """Return the similarity of ``old`` to the accused's own work from before ``old`` was public.

    An author's new update resembles a merged copy of the author's earlier work as much as it resembles that work.
    Without this check, the copy would be evidence against the original author. Duplicates count, since they are honest
    work. Returns 0 if there is no such work.
    """
    declared = func.coalesce(updates.c.committed_at, updates.c.received_at)
    mine = (updates.c.contributor == row.contributor) & updates.c.verdict.in_(("merged", "duplicate"))
    query = select(updates).where(mine, declared < old.public_since).order_by(declared.desc())
    with state.database.reading() as tx:
        own = tx.execute(query.limit(_OWN_UPDATES)).all()
    before = [
        EarlierWork(
            f"update {one.update_id[:12]}",
            frozenset({one.contributor}),
            False,
            one.delta_sha256,
            base_of(one),
            0.0,
        )
        for one in own
    ]
    with all_opened(state.base, state.store, [old, *before]) as opened:
        if old not in opened or len(opened) < 2:
            return 0.0
        others = [file for one, file in opened.items() if one is not old]
        return float(compare([opened[old], *others], state.base).similarity[0, 1:].max())


def earlier_work(
    config: ServerConfig, database: Database, round_store: RoundStore, server_round: int
) -> dict[int, list[EarlierWork]]:
    """Return the merged updates and soups of earlier rounds, by round."""
    first = server_round - config.rewards.stale_rounds
    found: dict[int, list[EarlierWork]] = {}
    with database.reading() as tx:
        where = (updates.c.server_round >= first) & (updates.c.server_round < server_round)
        for row in tx.execute(_MERGED.where(where).order_by(updates.c.update_id)):
            found.setdefault(row.server_round, []).append(_merged_work(row))
        where = (versions.c.server_round >= first) & (versions.c.server_round < server_round)
        for row in tx.execute(select(versions).where(where)).all():
            parent = tx.scalar(select(versions.c.digest).where(versions.c.height == row.parent))
            what = f"the soup of round {row.server_round}"
            who = frozenset[str]().union(*(one.contributors for one in found.get(row.server_round, [])))
            base = parent or round_store.base_digest
            found.setdefault(row.server_round, []).append(
                EarlierWork(what, who, True, row.soup_sha256, base, row.committed_at)
            )
    return found


def newest_work(
    database: Database, contributors: Collection[str], server_round: int
) -> dict[str, EarlierWork]:
    """Return each contributor's newest merged update before a round, regardless of its age."""
    where = updates.c.contributor.in_(contributors) & (updates.c.server_round < server_round)
    newest = (
        select(updates.c.contributor, func.max(updates.c.server_round).label("newest"))
        .join(versions, versions.c.server_round == updates.c.server_round)
        .where(where, updates.c.verdict == "merged")
        .group_by(updates.c.contributor)
        .subquery()
    )
    of_it = (updates.c.contributor == newest.c.contributor) & (updates.c.server_round == newest.c.newest)
    found: dict[str, EarlierWork] = {}
    with database.reading() as tx:
        for row in tx.execute(_MERGED.join(newest, of_it).order_by(updates.c.update_id)):
            found.setdefault(row.contributor, _merged_work(row))
    return found


def _merged_work(row: Any) -> EarlierWork:
    what = f"update {row.update_id[:12]} by {row.contributor} of round {row.server_round}"
    who = frozenset({row.contributor})
    return EarlierWork(what, who, False, row.delta_sha256, base_of(row), row.public_since)


def by_round(earlier: dict[int, list[EarlierWork]]) -> Iterator[list[EarlierWork]]:
    """Yield the work of each round, newest round first."""
    for server_round in sorted(earlier, reverse=True):
        yield earlier[server_round]


@contextmanager
def all_opened(
    base: BaseSpec, store: ObjectStore, earlier: Sequence[EarlierWork]
) -> Iterator[dict[EarlierWork, DeltaFile]]:
    """Open the files of earlier work; deleted files are skipped with a warning."""
    with ExitStack() as stack:
        opened = {}
        for old in earlier:
            try:
                opened[old] = opened_update(stack, base, store, old.sha256, old.base_digest)
            except GymError as error:
                if error.code is not ErrorCode.NOT_FOUND:
                    raise
                log.warning("skipped the comparison with %s: %s", old.what, error)
        yield opened


def opened_update(
    stack: ExitStack, base: BaseSpec, store: ObjectStore, sha256: str, base_digest: str
) -> DeltaFile:
    """Open an update's file until the stack is closed."""
    spec = BaseSpec(base.model_name, base_digest, base.shapes)
    return stack.enter_context(DeltaFile.open(store.local_path(sha256), spec))


def base_of(row: Any) -> str:
    """Return the digest of the version that an update starts from."""
    return UpdateManifest.parse(row.manifest).base_digest
