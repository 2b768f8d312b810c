"""Continuous rounds (``rounds.mode: continuous``): tasks outlive a merge, and updates may be a few versions old.

A round still produces one version and is the unit of the ledger and of replay. It accepts every update that arrives
before its merge, from any recent version; an update that arrives during a merge belongs to the next round.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sqlalchemy import Connection, Integer, cast, or_, select, update

from gym_fed.config.hub.credits import PayTerms
from gym_fed.config.hub.sections import RoundsConfig
from gym_fed.config.hub.soup import SoupRecipe
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.core.text import counted
from gym_fed.delta.base import BaseSpec
from gym_fed.trust.identity.manifest import UpdateManifest
from gym_server.accounts.keys import is_signed_by_revoked
from gym_server.rounds.queue import LATE
from gym_server.rounds.round_store import MERGING, latest_round
from gym_server.rounds.versions import head_of, versions_to
from gym_server.state import HubState
from gym_server.store.tables import accounts, messages, round_tasks, rounds, updates

if TYPE_CHECKING:
    from gym_fed.soup.window import RoundWindow

_AT_WORK = ("queued", "leased")


@dataclass(frozen=True)
class WindowUpdates:
    """The window of a continuous round, as manifests.

    Attributes:
        merge_every: Admitted weight at which a round is merged.
        max_staleness: Number of most recent merges whose updates are in ``others``.
        staleness: Age in versions of each of the round's own updates, in their order.
        others: Latest merged update of each contributor without an update in the round, ordered by id.
    """

    merge_every: int
    max_staleness: int
    staleness: Sequence[int]
    others: Sequence[UpdateManifest]

    def opened(
        self, stack: ExitStack, path_of: Callable[[str], Path], spec: BaseSpec, recipe: SoupRecipe
    ) -> RoundWindow:
        """Open the files of the other updates on ``stack``."""
        from gym_fed.delta.file import DeltaFile
        from gym_fed.soup.window import RoundWindow

        files = [
            stack.enter_context(DeltaFile.open(path_of(one.delta_sha256), spec, any_version=True))
            for one in self.others
        ]
        weights = recipe.weights([one.num_examples for one in self.others])
        return RoundWindow(self.merge_every, self.staleness, files, weights)

    def entry_fields(self, manifests: Sequence[UpdateManifest]) -> dict[str, Any]:
        """Return the window's fields for the version's ledger entry; ``manifests`` are the round's own updates."""
        added = [
            {"update": one.digest, "version": one.base_digest, "staleness": age}
            for one, age in zip(manifests, self.staleness, strict=True)
        ]
        return {
            "merge_every": self.merge_every,
            "max_staleness": self.max_staleness,
            "updates": added,
            "others": [one.digest for one in self.others],
        }

    @classmethod
    def recorded(
        cls, fields: Mapping[str, Any], manifest_of: Callable[[str], UpdateManifest]
    ) -> WindowUpdates:
        """Return the window that a ledger entry records."""
        return cls(
            fields["merge_every"],
            fields["max_staleness"],
            [one["staleness"] for one in fields["updates"]],
            [manifest_of(update_id) for update_id in fields["others"]],
        )


def ages(tx: Connection, base_digest: str, max_staleness: int) -> dict[str, int]:
    """Return the age in versions of each version that an update may start from, by digest; the current one is 0."""
    newest = versions_to(tx, head_of(tx, base_digest).height, max_staleness + 1)
    found = [version.digest for version in newest]
    if len(found) <= max_staleness:
        found.append(base_digest)
    return {digest: age for age, digest in enumerate(found)}


def _ages_in_round(tx: Connection, base_digest: str, config: RoundsConfig) -> dict[str, int]:
    """Like ``ages``, for admitted updates, which may be one version older because they waited during a merge."""
    return ages(tx, base_digest, config.max_staleness + 1 if config.mode == "continuous" else 0)


def known_versions(state: HubState, config: RoundsConfig) -> Collection[str]:
    """Return the digests of the versions that a round's updates may start from."""
    with state.database.reading() as tx:
        return _ages_in_round(tx, state.base.digest, config).keys()


def round_to_join(tx: Connection) -> int:
    """Return the round that an update joins now: the current one, or the next one during a merge."""
    current = latest_round(tx)
    if current is None:
        return 1
    return current.server_round + (current.is_over or current.state == MERGING)


def require_fresh(
    tx: Connection, manifest: UpdateManifest, task_round: int, base_digest: str, max_staleness: int
) -> None:
    """Check that an update starts from the version that its task named, and that this version is not too old.

    Args:
        tx: The caller's transaction.
        manifest: The update's manifest.
        task_round: Number of the round that handed out the task.
        base_digest: Digest of the base model.
        max_staleness: Maximum age in versions.

    Raises:
        GymError: ``STALE``, ``BASE_MISMATCH``.
    """
    spec = tx.scalar(select(rounds.c.spec).where(rounds.c.server_round == task_round))
    if spec is None or manifest.server_round != task_round:
        raise GymError(
            ErrorCode.STALE,
            f"the manifest is for round {manifest.server_round}, but its task is from round {task_round}",
        )
    expected = json.loads(spec)["version_digest"]
    if manifest.base_digest != expected:
        raise GymError(
            ErrorCode.BASE_MISMATCH,
            f"the update is for base {manifest.base_digest[:19]}, but its task starts from {expected[:19]}",
            "train from the task's version",
        )
    if manifest.base_digest not in ages(tx, base_digest, max_staleness):
        raise GymError(
            ErrorCode.STALE,
            f"the update starts from the version of round {task_round}, which is more than "
            f"{counted(max_staleness, 'version')} old (rounds.max_staleness) or was rolled back",
            "the next task starts from the newest version",
        )


def window_of(
    tx: Connection, base_digest: str, config: RoundsConfig, manifests: Sequence[UpdateManifest]
) -> WindowUpdates | None:
    """Return the window of a round; None for a synchronous round.

    Args:
        tx: A transaction, possibly read-only.
        base_digest: Digest of the base model.
        config: Round settings: the mode, and the number of most recent merges whose updates are in it.
        manifests: The round's own updates, which start from versions in ``known_versions``.
    """
    if config.mode != "continuous":
        return None
    age_of = _ages_in_round(tx, base_digest, config)
    others = _latest(tx, base_digest, {one.contributor for one in manifests}, config.max_staleness)
    staleness = [age_of[one.base_digest] for one in manifests]
    return WindowUpdates(config.merge_every, config.max_staleness, staleness, others)


def round_window(
    state: HubState, config: RoundsConfig, manifests: Sequence[UpdateManifest]
) -> WindowUpdates | None:
    """Like ``window_of``, in a separate transaction."""
    with state.database.reading() as tx:
        return window_of(tx, state.base.digest, config, manifests)


def _latest(
    tx: Connection, base_digest: str, without: Collection[str], max_staleness: int
) -> list[UpdateManifest]:
    newest = versions_to(tx, head_of(tx, base_digest).height, max_staleness)
    merged_in = [version.server_round for version in newest]
    query = (
        select(updates.c.contributor, updates.c.manifest, updates.c.signature)
        .outerjoin(accounts, accounts.c.contributor == updates.c.contributor)
        .where(updates.c.server_round.in_(merged_in), updates.c.verdict == "merged")
        .where(or_(accounts.c.status.is_(None), accounts.c.status == "active"))
        .order_by(updates.c.server_round.desc(), updates.c.update_id)
    )
    latest: dict[str, Any] = {}
    for row in tx.execute(query):
        if row.contributor not in without:
            latest.setdefault(row.contributor, row)
    rows = [row for row in latest.values() if not is_signed_by_revoked(tx, row)]
    return sorted((UpdateManifest.parse(row.manifest) for row in rows), key=lambda one: one.digest)


def carry_tasks(
    tx: Connection, server_round: int, base_digest: str, max_staleness: int, pay: PayTerms
) -> None:
    """Carry the previous round's open tasks over to the new round.

    Tasks from versions that are too old are withdrawn, as are tasks with different pay terms, since their contributors
    have not agreed to the new ones. Tasks that were answered during the merge are carried too, since their updates
    belong to the new round.
    """
    fresh = ages(tx, base_digest, max_staleness)
    query = (
        select(
            round_tasks.c.node_id,
            messages.c.message_id,
            messages.c.state,
            rounds.c.spec,
            updates.c.server_round.label("joined"),
        )
        .join(messages, messages.c.message_id == round_tasks.c.message_id)
        .join(rounds, rounds.c.server_round == cast(messages.c.group_id, Integer))
        .outerjoin(updates, updates.c.message_id == round_tasks.c.message_id)
        .where(round_tasks.c.server_round == server_round - 1, round_tasks.c.outcome == "")
    )
    for row in tx.execute(query).all():
        spec = json.loads(row.spec)
        fits = spec["version_digest"] in fresh and spec["pay"] == pay.model_dump(mode="json")
        if row.state in _AT_WORK and not fits:
            tx.execute(update(messages).where(messages.c.message_id == row.message_id).values(state=LATE))
        elif row.state in _AT_WORK or row.joined == server_round:
            tx.execute(
                round_tasks.insert().values(
                    server_round=server_round, node_id=row.node_id, message_id=row.message_id
                )
            )
