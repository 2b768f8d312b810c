"""Find free-riders: zeros, near copies, and updates that were sent or merged before.

Found by the updates' norms and angles alone. Noise has the angles of honest work on unusual data; its score shows it.
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
from gym_fed.delta.base import BaseSpec
from gym_fed.delta.file import DeltaFile
from gym_fed.errors import ErrorCode, GymError
from gym_fed.identity.manifest import UpdateManifest
from gym_fed.soup.sybils.similarity import (
    Matrix,
    beyond,
    compare,
    groups_of,
    leaders,
    similarities,
    torn_apart,
)
from gym_server.federation import Federation
from gym_server.store.tables import updates, versions

log = logging.getLogger("gym_server")

_USED = ("merged", "rejected", "aborted")


@dataclass(frozen=True)
class FreeRiderFinding:
    """Why an update free-rides.

    Attributes:
        reason: In words for the contributor and the ledger.
        cheating: Whether it is proven, not only worthless.
        blameless: Whether honest work can look like that too: the update is rejected, and no reputation is lost.
        leader: The update of the same round that it is a copy of.
    """

    reason: str
    cheating: bool = True
    blameless: bool = False
    leader: str = ""


@dataclass(frozen=True)
class _Earlier:
    """Something of an earlier round that can be sent again."""

    what: str
    contributors: frozenset[str]  # whose work it is
    soup: bool
    merged: bool
    sha256: str
    base_digest: str


@dataclass(frozen=True)
class RoundSimilarity:
    """Similarity of the updates of a round that are neither zeros nor stale.

    Attributes:
        nearest: By update, the largest similarity to another of the round.
        updates: The order of ``links``.
        cosines: ``[n, n]`` of the whole updates.
        torn: ``[n, n]`` pairs that look like one update cut in two.
    """

    nearest: dict[str, float] = field(default_factory=dict)
    updates: list[str] = field(default_factory=list)
    cosines: Matrix = field(default_factory=lambda: np.zeros((0, 0)))
    torn: NDArray[np.bool_] = field(default_factory=lambda: np.zeros((0, 0), dtype=bool))

    def together(self, updates: Collection[str], threshold: float, measured: bool = False) -> list[list[str]]:
        """Those of ``updates`` that are paid as one, two or more at a time; docs/rewards.md has the rule.

        Args:
            updates: Those that earn.
            threshold: From where on two are linked.
            measured: Whether they do so by a score, so that there is no noise among them.
        """
        places = [i for i, update in enumerate(self.updates) if update in updates]
        among = np.ix_(places, places)
        links = np.where(self.torn[among], 1.0, beyond(self.cosines[among], each=not measured))
        groups = groups_of(links, threshold)
        return [[self.updates[places[i]] for i in group] for group in groups if len(group) > 1]


def free_riders(
    fed: Federation, rows: Sequence[Any], server_round: int
) -> tuple[dict[str, FreeRiderFinding], RoundSimilarity]:
    """Look through a round's updates.

    Args:
        fed: The federation.
        rows: Rows of ``updates``, of updates that no screen has rejected so far.
        server_round: The round.

    Returns:
        A finding for each update that free-rides; how alike the updates are.
    """
    config, found = fed.config.rewards, dict[str, FreeRiderFinding]()
    alike = RoundSimilarity()
    if not (config.min_norm_ratio or config.compares):
        return found, alike  # nobody looks into updates, as where they are hidden
    with ExitStack() as stack:
        files = {row.update_id: _opened(stack, fed, row.delta_sha256, _base(row)) for row in rows}
        found |= _zeros(config, {update: file.norm() for update, file in files.items()})
        left = [row for row in rows if row.update_id not in found]
        if config.stale_threshold is not None or config.similarity_threshold is not None:
            found |= _stale(fed, left, files, server_round)
        left = [row for row in left if row.update_id not in found]
        if len(left) > 1 and (config.similarity_threshold or config.together_threshold):
            alike, similarity = _similarity(fed, left, files)
            if config.similarity_threshold is not None:
                found |= _copies(left, similarity, config.similarity_threshold)
    return found, alike


def _zeros(config: RewardsConfig, norms: dict[str, float]) -> dict[str, FreeRiderFinding]:
    if not config.min_norm_ratio or not norms:
        return {}
    least = config.min_norm_ratio * statistics.median_low(norms.values())  # of two: the smaller
    return {
        update: FreeRiderFinding(
            f"its norm {norm:.3g} is nothing beside the round's median (rewards.min_norm_ratio)",
            cheating=False,
        )
        for update, norm in norms.items()
        if norm == 0.0 or norm < least
    }


def _similarity(
    fed: Federation, rows: Sequence[Any], files: dict[str, DeltaFile]
) -> tuple[RoundSimilarity, Matrix]:
    opened = [files[row.update_id] for row in rows]
    compared = compare(opened, fed.base)
    off = np.where(np.eye(len(rows), dtype=bool), -1.0, compared.similarity)
    nearest = {row.update_id: float(off[i].max()) for i, row in enumerate(rows)}
    torn = np.zeros(off.shape, dtype=bool)
    if fed.config.rewards.together_threshold is not None:
        torn = torn_apart(opened, fed.base)
    return RoundSimilarity(
        nearest, [row.update_id for row in rows], compared.cosine, torn
    ), compared.similarity


def _copies(rows: Sequence[Any], alike: Matrix, threshold: float) -> dict[str, FreeRiderFinding]:
    order = sorted(range(len(rows)), key=lambda i: (rows[i].received_at, rows[i].update_id))
    found = {}
    for i, leader in enumerate(leaders(alike, order, threshold)):
        if leader != i:
            first = rows[leader]
            found[rows[i].update_id] = FreeRiderFinding(
                f"a near copy (similarity {alike[i, leader]:.3f}) of update {first.update_id[:12]} by "
                f"{first.contributor}, which came first",
                leader=first.update_id,
            )
    return found


def _stale(
    fed: Federation, rows: Sequence[Any], files: dict[str, DeltaFile], server_round: int
) -> dict[str, FreeRiderFinding]:
    found: dict[str, FreeRiderFinding] = {}
    for earlier in _by_round(_earlier(fed, server_round)):
        left = [row for row in rows if row.update_id not in found]
        with _all_opened(fed, earlier) as opened:
            if not left or not opened:
                continue
            alike = similarities([*(files[r.update_id] for r in left), *opened.values()], fed.base)
            for i, row in enumerate(left):
                for j, old in enumerate(opened):
                    threshold, similarity = (
                        _threshold(fed.config.rewards, row.contributor, old),
                        alike[i, len(left) + j],
                    )
                    if threshold is not None and similarity >= threshold and row.update_id not in found:
                        own = row.contributor in old.contributors
                        reason = f"stale: {old.what} again (similarity {similarity:.3f})"
                        found[row.update_id] = FreeRiderFinding(reason, cheating=not own, blameless=own)
    return found


def _threshold(config: RewardsConfig, contributor: str, old: _Earlier) -> float | None:
    """From which similarity on it is the same; None where the two are not compared.

    One's own update of an aborted round was not used, and may come again.
    """
    if not old.soup and contributor not in old.contributors:
        return config.similarity_threshold
    return config.stale_threshold if old.merged else None


def _earlier(fed: Federation, server_round: int) -> dict[int, list[_Earlier]]:
    """What earlier rounds have left, by round."""
    first = server_round - fed.config.rewards.stale_rounds
    found: dict[int, list[_Earlier]] = {}
    with fed.database.reading() as tx:
        where = (updates.c.server_round >= first) & (updates.c.server_round < server_round)
        kept = select(updates).where(where, updates.c.verdict.in_(_USED)).order_by(updates.c.update_id)
        for row in tx.execute(kept):
            what = f"update {row.update_id[:12]} by {row.contributor} of round {row.server_round}"
            used = row.verdict == "merged"
            old = _Earlier(what, frozenset({row.contributor}), False, used, row.delta_sha256, _base(row))
            found.setdefault(row.server_round, []).append(old)
        where = (versions.c.server_round >= first) & (versions.c.server_round < server_round)
        for row in tx.execute(select(versions).where(where)).all():
            parent = tx.scalar(select(versions.c.digest).where(versions.c.height == row.parent))
            what = f"the soup of round {row.server_round}"
            of = (one.contributors for one in found.get(row.server_round, []) if one.merged)
            who = frozenset[str]().union(*of)
            base = parent or fed.round_store.base_digest
            soup = _Earlier(what, who, True, True, row.soup_sha256, base)
            found.setdefault(row.server_round, []).append(soup)
    return found


def _by_round(earlier: dict[int, list[_Earlier]]) -> Iterator[list[_Earlier]]:
    for server_round in sorted(earlier, reverse=True):
        yield earlier[server_round]


@contextmanager
def _all_opened(fed: Federation, earlier: Sequence[_Earlier]) -> Iterator[dict[_Earlier, DeltaFile]]:
    with ExitStack() as stack:
        opened = {}
        for old in earlier:
            try:
                opened[old] = _opened(stack, fed, old.sha256, old.base_digest)
            except GymError as error:
                if error.code is not ErrorCode.NOT_FOUND:
                    raise
                log.warning("no update is compared with %s: %s", old.what, error)
        yield opened


def _opened(stack: ExitStack, fed: Federation, sha256: str, base_digest: str) -> DeltaFile:
    spec = BaseSpec(fed.base.model_name, base_digest, fed.base.shapes)
    return stack.enter_context(DeltaFile.open(fed.store.local_path(sha256), spec))


def _base(row: Any) -> str:
    return UpdateManifest.parse(row.manifest).base_digest
