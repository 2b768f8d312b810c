"""Find free-riding updates: zeros, resent merged work, and duplicates within a round.

Only the norms and angles of updates are used. Noise cannot be detected this way, since its angles are like those of
honest work on unusual data. It is detected by its score.
"""

from __future__ import annotations

import statistics
from collections.abc import Collection, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gym_fed.config.hub.credits import RewardsConfig
from gym_fed.config.hub.server import ServerConfig
from gym_fed.soup.screening import (
    Matrix,
    beyond,
    compare,
    groups_of,
    leaders,
    same_source,
    torn_apart,
)
from gym_server.rewards.earlier_work import (
    EarlierWork,
    FreeRiderFinding,
    all_opened,
    base_of,
    newest_work,
    opened_update,
    stale_work,
)
from gym_server.state import HubState


@dataclass(frozen=True)
class RoundSimilarity:
    """Similarity of the updates of a round that passed the screens.

    Attributes:
        nearest: Largest similarity to another update of the round, by update.
        updates: Ids of the updates, in the order of the matrices.
        cosines: ``[n, n]`` cosine similarities of the entire updates.
        torn: ``[n, n]`` bool; True for pairs that look like two parts of one update.
        previous: ``[n, n]`` cosine of update i with the previous merged update of the author of update j; NaN if there
            is none.
    """

    nearest: dict[str, float] = field(default_factory=dict)
    updates: list[str] = field(default_factory=list)
    cosines: Matrix = field(default_factory=lambda: np.zeros((0, 0)))
    torn: NDArray[np.bool_] = field(default_factory=lambda: np.zeros((0, 0), dtype=bool))
    previous: Matrix = field(default_factory=lambda: np.zeros((0, 0)))

    @property
    def comparable(self) -> set[str]:
        """Updates whose author's previous update is known."""
        known = ~np.isnan(self.previous.diagonal())
        return {update for update, is_known in zip(self.updates, known, strict=True) if is_known}

    def together(self, updates: Collection[str], threshold: float) -> list[list[str]]:
        """Return groups of two or more updates that are paid as one; docs/rewards.md has the rule.

        Args:
            updates: The counted updates, without duplicates.
            threshold: Similarity from which two updates are linked.
        """
        places = [i for i, update in enumerate(self.updates) if update in updates]
        among = np.ix_(places, places)
        close = beyond(self.cosines[among])
        links = np.where(self.torn[among] | same_source(self.previous[among]), 1.0, close)
        groups = groups_of(links, threshold)
        return [[self.updates[places[i]] for i in group] for group in groups if len(group) > 1]


def free_riders(
    state: HubState, config: ServerConfig, rows: Sequence[Any], server_round: int
) -> dict[str, FreeRiderFinding]:
    """Find updates that are zero or resend merged work.

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
            row.update_id: opened_update(stack, state.base, state.store, row.delta_sha256, base_of(row))
            for row in rows
        }
        found = _zeros(config.rewards, {update: file.norm() for update, file in files.items()})
        left = [row for row in rows if row.update_id not in found]
        return found | stale_work(state, config, left, files, server_round)


def duplicates(
    state: HubState, config: ServerConfig, rows: Sequence[Any], server_round: int
) -> tuple[dict[str, FreeRiderFinding], RoundSimilarity]:
    """Find duplicate updates within a round.

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
    least = config.min_norm_ratio * statistics.median_low(norms.values())  # of two norms, the smaller one
    return {
        update: FreeRiderFinding(
            f"its norm {norm:.3g} is negligible compared with the round's median (rewards.min_norm_ratio)",
            cheating=False,
        )
        for update, norm in norms.items()
        if norm == 0.0 or norm < least
    }


def _similarity(
    state: HubState, config: ServerConfig, rows: Sequence[Any], server_round: int
) -> tuple[RoundSimilarity, Matrix]:
    n, authors = len(rows), [row.contributor for row in rows]
    latest: dict[str, EarlierWork] = {}
    if config.rewards.together_threshold is not None:
        latest = newest_work(state.database, authors, server_round)
    with ExitStack() as stack:
        files = [
            opened_update(stack, state.base, state.store, row.delta_sha256, base_of(row)) for row in rows
        ]
        previous = stack.enter_context(
            all_opened(state.base, state.store, [latest[who] for who in authors if who in latest])
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
    """Return a finding for every update of a group of duplicates except the first committed one.

    Contributors cannot get each other's updates of the same round from the hub, and two people with the same rows send
    nearly the same update. Duplicates are therefore not treated as cheating: the group counts once and shares its pay.
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
