"""Find zeros, resent merged work, and updates of one round that are the same work.

Only the norms and angles of updates are used. Noise cannot be detected this way, since its angles are those of honest
work on unusual data; its score reveals it.
"""

from __future__ import annotations

import logging
import statistics
from collections.abc import Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray
from sqlalchemy import select

from gym_fed.config.hub.credits import RewardsConfig
from gym_fed.config.hub.server import ServerConfig
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.delta.base import BaseSpec
from gym_fed.delta.file import DeltaFile
from gym_fed.soup.screening import (
    Matrix,
    beyond,
    compare,
    groups_of,
    leaders,
    same_source,
    torn_apart,
)
from gym_fed.trust.identity.manifest import UpdateManifest
from gym_server.rounds.round_store import RoundStore
from gym_server.state import HubState
from gym_server.store.database import Database
from gym_server.store.objects import ObjectStore
from gym_server.store.tables import updates, versions

log = logging.getLogger("gym_server")

_IDENTICAL = 1.0 - 1e-6
"""Similarity of an update with a scaled or sign-only copy of itself. Training again does not reach it."""


_AT_ONCE = 16
"""Updates that are compared with a soup at once."""


@dataclass(frozen=True)
class FreeRiderFinding:
    """The reason why an update free-rides, or is the same work as another.

    Attributes:
        reason: Explanation for the contributor and the ledger.
        cheating: True if cheating is proven; False if the update is only worthless.
        blameless: True if honest work can look the same: the update is rejected without loss of reputation.
        leader: The update of the same round that is the same work; a finding with a leader does not reject the update.
    """

    reason: str
    cheating: bool = True
    blameless: bool = False
    leader: str = ""


@dataclass(frozen=True)
class _Earlier:
    """A merged update, or the soup, of an earlier round."""

    what: str
    contributors: frozenset[str]  # its authors
    soup: bool
    sha256: str
    base_digest: str
    public_since: float  # when its version was made, Unix seconds


@dataclass(frozen=True)
class RoundSimilarity:
    """Similarity of the updates of a round that passed the screens.

    Attributes:
        nearest: Largest similarity to another update of the round, by update.
        updates: Ids of the updates, in the order of the matrices.
        cosines: ``[n, n]`` cosine similarities of the entire updates.
        torn: ``[n, n]`` bool; True for pairs that look like one update split in two.
        previous: ``[n, n]`` cosine of update i with the previous merged update of the author of update j; NaN without
            one.
    """

    nearest: dict[str, float] = field(default_factory=dict)
    updates: list[str] = field(default_factory=list)
    cosines: Matrix = field(default_factory=lambda: np.zeros((0, 0)))
    torn: NDArray[np.bool_] = field(default_factory=lambda: np.zeros((0, 0), dtype=bool))
    previous: Matrix = field(default_factory=lambda: np.zeros((0, 0)))

    def together(self, updates: Collection[str], threshold: float, measured: bool = False) -> list[list[str]]:
        """Return groups of two or more updates that are paid as one; docs/rewards.md has the rule.

        Args:
            updates: The updates that earn credits.
            threshold: Similarity from which two updates are linked.
            measured: True if the updates earn by score, so that there is no noise among them.
        """
        places = [i for i, update in enumerate(self.updates) if update in updates]
        among = np.ix_(places, places)
        close = beyond(self.cosines[among], each=not measured)
        links = np.where(self.torn[among] | same_source(self.previous[among]), 1.0, close)
        groups = groups_of(links, threshold)
        return [[self.updates[places[i]] for i in group] for group in groups if len(group) > 1]


def free_riders(
    state: HubState, config: ServerConfig, rows: Sequence[Any], server_round: int
) -> dict[str, FreeRiderFinding]:
    """Find zeros and resent merged work.

    Args:
        state: The hub's state.
        config: The hub's config.
        rows: Rows of ``updates`` that no screen has rejected so far.
        server_round: Number of the round.

    Returns:
        A finding for each update that free-rides.
    """
    if config.hides_updates:
        return {}
    with ExitStack() as stack:
        files = {
            row.update_id: _opened(stack, state.base, state.store, row.delta_sha256, _base(row))
            for row in rows
        }
        found = _zeros(config.rewards, {update: file.norm() for update, file in files.items()})
        left = [row for row in rows if row.update_id not in found]
        return found | _stale(state, config, left, files, server_round)


def duplicates(
    state: HubState, config: ServerConfig, rows: Sequence[Any], server_round: int
) -> tuple[dict[str, FreeRiderFinding], RoundSimilarity]:
    """Find updates of one round that are the same work.

    Args:
        state: The hub's state.
        config: The hub's config.
        rows: Rows of ``updates`` that every other screen has passed.
        server_round: Number of the round.

    Returns:
        A finding for each update but the first of each group, and the similarity of the updates.
    """
    rewards = config.rewards
    if config.hides_updates or len(rows) < 2:
        return {}, RoundSimilarity()
    alike, similarity = RoundSimilarity(), None
    if rewards.similarity_threshold or rewards.together_threshold:
        alike, similarity = _similarity(state, config, rows, server_round)
    return _duplicates(rows, similarity, rewards.similarity_threshold), alike


def _zeros(config: RewardsConfig, norms: dict[str, float]) -> dict[str, FreeRiderFinding]:
    if not config.min_norm_ratio or not norms:
        return {}
    least = config.min_norm_ratio * statistics.median_low(norms.values())  # the smaller one of two
    return {
        update: FreeRiderFinding(
            f"its norm {norm:.3g} is nothing beside the round's median (rewards.min_norm_ratio)",
            cheating=False,
        )
        for update, norm in norms.items()
        if norm == 0.0 or norm < least
    }


def _similarity(
    state: HubState, config: ServerConfig, rows: Sequence[Any], server_round: int
) -> tuple[RoundSimilarity, Matrix]:
    n, authors = len(rows), [row.contributor for row in rows]
    latest: dict[str, _Earlier] = {}
    if config.rewards.together_threshold is not None:
        earlier = _earlier(config, state.database, state.round_store, server_round)
        for old in (old for of_round in _by_round(earlier) for old in of_round if not old.soup):
            (who,) = old.contributors
            latest.setdefault(who, old)
    with ExitStack() as stack:
        files = [_opened(stack, state.base, state.store, row.delta_sha256, _base(row)) for row in rows]
        previous = stack.enter_context(
            _all_opened(state.base, state.store, [latest[who] for who in authors if who in latest])
        )
        compared = compare([*files, *previous.values()], state.base)
        torn = np.zeros((n, n), dtype=bool)
        if config.rewards.together_threshold is not None:
            torn = torn_apart(files, state.base)
    across = np.full((n, n), np.nan)
    for place, old in enumerate(previous):
        (who,) = old.contributors
        across[:, authors.index(who)] = compared.cosine[:n, n + place]
    similarity = compared.similarity[:n, :n]
    off = np.where(np.eye(n, dtype=bool), -1.0, similarity)
    nearest = {row.update_id: float(off[i].max()) for i, row in enumerate(rows)}
    ids = [row.update_id for row in rows]
    return RoundSimilarity(nearest, ids, compared.cosine[:n, :n], torn, across), similarity


def _duplicates(
    rows: Sequence[Any], alike: Matrix | None, threshold: float | None
) -> dict[str, FreeRiderFinding]:
    """Find updates of one round that are the same work: all but the first committed one of each group.

    A contributor cannot get another's update of the same round from the hub, and two people with the same rows send
    nearly the same. So this is never cheating: the group counts once, and shares its pay.
    """
    order = sorted(
        range(len(rows)), key=lambda i: (rows[i].committed_at or rows[i].received_at, rows[i].update_id)
    )
    same_bytes = np.array([[1.0 if a.delta_sha256 == b.delta_sha256 else 0.0 for b in rows] for a in rows])
    if alike is None or threshold is None:
        alike, threshold = same_bytes, 1.0
    found = {}
    for i, leader in enumerate(leaders(np.maximum(alike, same_bytes), order, threshold)):
        if leader != i:
            first = rows[leader]
            found[rows[i].update_id] = FreeRiderFinding(
                f"the same work (similarity {max(alike[i, leader], same_bytes[i, leader]):.3f}) as update "
                f"{first.update_id[:12]} by {first.contributor}",
                cheating=False,
                leader=first.update_id,
            )
    return found


def _stale(
    state: HubState, config: ServerConfig, rows: Sequence[Any], files: dict[str, DeltaFile], server_round: int
) -> dict[str, FreeRiderFinding]:
    """Find updates that resend merged work of earlier rounds.

    Rejected work, or work of an aborted round, is not evidence: nobody was paid for it.
    """
    found: dict[str, FreeRiderFinding] = {}
    threshold = config.rewards.stale_threshold
    if threshold is None:
        return found
    earlier = _earlier(config, state.database, state.round_store, server_round)
    for old, row, similarity in _to_earlier(state, rows, files, earlier):
        own = row.contributor in old.contributors
        if similarity < (_IDENTICAL if own else threshold) or row.update_id in found:
            continue
        chance = 0.0 if own else _repeated_work(state.base, state.store, row, old, rows, files, earlier)
        if similarity > chance or similarity >= _IDENTICAL:
            reason = f"stale: {old.what} again (similarity {similarity:.3f})"
            honest = own or _is_independent(row, old)
            found[row.update_id] = FreeRiderFinding(reason, not honest, blameless=honest)
    return found


def _to_earlier(
    state: HubState, rows: Sequence[Any], files: dict[str, DeltaFile], earlier: dict[int, list[_Earlier]]
) -> Iterator[tuple[_Earlier, Any, float]]:
    """Yield the similarity of every update to every earlier one and every soup, newest rounds first.

    A soup has another codec than updates, so signs compared with it are decoded, and ``compare`` measures all pairs.
    A few updates at a time keep that linear in their number.
    """
    for of_round in _by_round(earlier):
        for olds, at_once in (
            ([old for old in of_round if not old.soup], max(1, len(rows))),
            ([old for old in of_round if old.soup], _AT_ONCE),
        ):
            with _all_opened(state.base, state.store, olds) as opened:
                for start in range(0, len(rows) if opened else 0, at_once):
                    some = rows[start : start + at_once]
                    new = [files[row.update_id] for row in some]
                    alike = compare([*new, *opened.values()], state.base).similarity
                    for i, row in enumerate(some):
                        for j, old in enumerate(opened, start=len(some)):
                            yield old, row, float(alike[i, j])


def _is_independent(row: Any, old: _Earlier) -> bool:
    """Return True if honest work can be like an earlier round's; it is rejected, since that was paid for already.

    In continuous rounds two contributors with the same rows train from one version and are merged in different rounds.
    """
    is_earlier = (row.committed_at or row.received_at) < old.public_since
    return bool(is_earlier or (not old.soup and old.base_digest == _base(row)))


def _repeated_work(
    base: BaseSpec,
    store: ObjectStore,
    row: Any,
    old: _Earlier,
    rows: Sequence[Any],
    files: dict[str, DeltaFile],
    earlier: dict[int, list[_Earlier]],
) -> float:
    """Measure how similar honest work on the same rows is: the maximum similarity of an author's updates of two rounds.

    The authors are the accounts that sent ``old``, without the accused: otherwise a copier could raise the threshold by
    repeating its copy. Updates of this round and earlier merged ones are compared. Returns 0 if no author has two.
    """
    largest = 0.0
    for who in old.contributors - {row.contributor}:
        merged = [one for of_round in earlier.values() for one in of_round if one.contributors == {who}]
        with _all_opened(base, store, [one for one in merged if not one.soup]) as opened:
            mine = [files[one.update_id] for one in rows if one.contributor == who]
            mine += opened.values()
            if len(mine) > 1:
                alike = compare(mine, base).similarity
                largest = max(largest, float(np.where(np.eye(len(mine), dtype=bool), 0.0, alike).max()))
    return largest


def _earlier(
    config: ServerConfig, database: Database, round_store: RoundStore, server_round: int
) -> dict[int, list[_Earlier]]:
    """Return the merged updates and soups of earlier rounds, by round."""
    first = server_round - config.rewards.stale_rounds
    found: dict[int, list[_Earlier]] = {}
    with database.reading() as tx:
        where = (updates.c.server_round >= first) & (updates.c.server_round < server_round)
        kept = (
            select(updates, versions.c.committed_at.label("public_since"))
            .join(versions, versions.c.server_round == updates.c.server_round)
            .where(where, updates.c.verdict == "merged")
            .order_by(updates.c.update_id)
        )
        for row in tx.execute(kept):
            what = f"update {row.update_id[:12]} by {row.contributor} of round {row.server_round}"
            who = frozenset({row.contributor})
            old = _Earlier(what, who, False, row.delta_sha256, _base(row), row.public_since)
            found.setdefault(row.server_round, []).append(old)
        where = (versions.c.server_round >= first) & (versions.c.server_round < server_round)
        for row in tx.execute(select(versions).where(where)).all():
            parent = tx.scalar(select(versions.c.digest).where(versions.c.height == row.parent))
            what = f"the soup of round {row.server_round}"
            who = frozenset[str]().union(*(one.contributors for one in found.get(row.server_round, [])))
            base = parent or round_store.base_digest
            found.setdefault(row.server_round, []).append(
                _Earlier(what, who, True, row.soup_sha256, base, row.committed_at)
            )
    return found


def _by_round(earlier: dict[int, list[_Earlier]]) -> Iterator[list[_Earlier]]:
    for server_round in sorted(earlier, reverse=True):
        yield earlier[server_round]


@contextmanager
def _all_opened(
    base: BaseSpec, store: ObjectStore, earlier: Sequence[_Earlier]
) -> Iterator[dict[_Earlier, DeltaFile]]:
    with ExitStack() as stack:
        opened = {}
        for old in earlier:
            try:
                opened[old] = _opened(stack, base, store, old.sha256, old.base_digest)
            except GymError as error:
                if error.code is not ErrorCode.NOT_FOUND:
                    raise
                log.warning("no update is compared with %s: %s", old.what, error)
        yield opened


def _opened(stack: ExitStack, base: BaseSpec, store: ObjectStore, sha256: str, base_digest: str) -> DeltaFile:
    spec = BaseSpec(base.model_name, base_digest, base.shapes)
    return stack.enter_context(DeltaFile.open(store.local_path(sha256), spec))


def _base(row: Any) -> str:
    return UpdateManifest.parse(row.manifest).base_digest
