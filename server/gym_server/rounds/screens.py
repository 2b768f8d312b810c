"""The screens of a round, each of which rejects updates for one reason; ``screens_of`` defines their order."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from sqlalchemy import select

from gym_fed.config.hub.server import ServerConfig
from gym_fed.config.hub.task import TaskSpec
from gym_fed.delta.base import BaseSpec
from gym_fed.delta.file import DeltaFile
from gym_fed.soup.screening import screen_norms
from gym_fed.trust.identity.manifest import UpdateManifest
from gym_server.accounts.keys import Keys
from gym_server.privacy import merge as private_merge
from gym_server.rewards.earlier_work import FreeRiderFinding
from gym_server.rewards.free_riders import RoundSimilarity, duplicates, free_riders
from gym_server.rounds.continuous import known_versions, round_window
from gym_server.rounds.factor_checks import foreign_a, not_low_rank
from gym_server.rounds.hub_model import HubModel
from gym_server.rounds.merge_progress import MergeProgress
from gym_server.rounds.round_store import Round
from gym_server.rounds.soup_record import Judgement
from gym_server.state import HubState
from gym_server.store.database import Database
from gym_server.store.objects import ObjectStore
from gym_server.store.tables import rounds, updates

MIN_FOR_NORM_SCREEN = 3


@dataclass(frozen=True)
class ScreenedUpdate:
    """An admitted update and the verdict on it so far."""

    row: Any
    path: Path
    judgement: Judgement

    @property
    def kept(self) -> bool:
        return self.judgement.verdict == "merged"

    @property
    def manifest(self) -> UpdateManifest:
        return UpdateManifest.parse(self.row.manifest)

    def duplicate(self, reason: str) -> ScreenedUpdate:
        reason = f"{reason}: it counts once, and the pay is shared"
        return replace(self, judgement=replace(self.judgement, verdict="duplicate", reason=reason))

    def needed(self, reason: str) -> ScreenedUpdate:
        reason = f"{reason}: the rule needs the votes of both, and the pay is shared"
        return replace(self, judgement=replace(self.judgement, verdict="merged", reason=reason))

    def rejected(self, reason: str, cheating: bool = False) -> ScreenedUpdate:
        judgement = replace(self.judgement, verdict="rejected", reason=reason, cheating=cheating)
        return replace(self, judgement=judgement)


@dataclass(frozen=True)
class ScreenedRound:
    """The updates of a round, ordered by id, and the findings of the screens.

    Attributes:
        updates: All updates, including rejected ones.
        findings: Findings on free-riders and duplicates, by update.
        similarity: Similarity of the updates that passed the other screens.
    """

    updates: list[ScreenedUpdate]
    findings: Mapping[str, FreeRiderFinding] = field(default_factory=dict)
    similarity: RoundSimilarity = field(default_factory=RoundSimilarity)

    @property
    def kept(self) -> list[ScreenedUpdate]:
        return [update for update in self.updates if update.kept]

    @property
    def rejections(self) -> list[Judgement]:
        return [update.judgement for update in self.updates if update.judgement.verdict == "rejected"]

    def with_duplicates(self) -> ScreenedRound:
        """Return the round with its duplicates merged too, for a rule that needs more updates than remain."""
        return self.each(
            lambda u: (
                u.needed(self.findings[u.row.update_id].reason) if u.judgement.verdict == "duplicate" else u
            )
        )

    def each(self, judge: Callable[[ScreenedUpdate], ScreenedUpdate]) -> ScreenedRound:
        """Return the round with ``judge`` applied to every update."""
        return replace(self, updates=[judge(update) for update in self.updates])


class Screen(ABC):
    """One reason to reject an update before the merge."""

    @abstractmethod
    def apply(self, screened: ScreenedRound) -> ScreenedRound:
        """Return the round with this screen's rejections."""


def screens_of(
    state: HubState, config: ServerConfig, keys: Keys, model: HubModel, current: Round
) -> list[Screen]:
    """Return the screens that the hub's config and the round's task require, cheap ones first.

    With secure aggregation the hub sees only the sum, so no screen reads the values of an individual update.
    """
    spec, gate, ratio = current.spec, config.gate, config.admission.norm_ratio
    hidden = config.secure_aggregation is not None
    screens: list[Screen] = [RevokedKeys(keys), Stale(state, config)]
    if spec is not None and spec.recipe.sends_factors:
        screens.append(FactorRank(spec, state.database))
        if spec.recipe.lora.freeze_a:
            screens.append(FrozenA(spec, model.spec))
    if spec is not None and config.privacy is not None and not hidden:
        screens.append(TrainedTensors(spec, state.base))
    if not hidden:
        screens.append(FreeRiders(state, config, current.server_round))
    if ratio is not None:
        screens.append(LargeNorms(ratio, state, config))
    if gate.screen_updates and model.has_gate:
        screens.append(HeldOutLoss(state, config, model))
    if not hidden:
        screens.append(Duplicates(state, config, current.server_round))
    return screens


def screen_updates(
    state: HubState,
    config: ServerConfig,
    keys: Keys,
    model: HubModel,
    current: Round,
    progress: MergeProgress,
) -> ScreenedRound:
    """Run every screen over the round's frozen list of updates."""
    screened = _load(state.database, state.store, current, progress)
    screens = screens_of(state, config, keys, model, current)
    for place, screen in enumerate(screens):
        if isinstance(screen, HeldOutLoss):
            progress.begin("checking updates", len(screened.kept))
            screen.on_update = progress.step
        else:
            progress.begin("running checks", len(screens), place)
        screened = screen.apply(screened)
    return screened


def _load(database: Database, store: ObjectStore, current: Round, progress: MergeProgress) -> ScreenedRound:
    with database.reading() as tx:
        rows = tx.execute(
            select(updates).where(updates.c.update_id.in_(current.merging)).order_by(updates.c.update_id)
        ).all()
    progress.begin("reading updates", len(rows))
    found = []
    for row in rows:
        path = store.local_path(row.delta_sha256)  # downloads the object if the store is remote
        found.append(ScreenedUpdate(row, path, Judgement(row.update_id, row.contributor, "merged", "")))
        progress.step()
    return ScreenedRound(found)


class RevokedKeys(Screen):
    """Reject updates signed by a key that has been revoked since."""

    def __init__(self, keys: Keys) -> None:
        self._keys = keys

    def apply(self, screened: ScreenedRound) -> ScreenedRound:
        revoked = self._keys.signed_by_revoked([update.row for update in screened.updates])
        reason = "the key was revoked before the merge"
        return screened.each(lambda u: u.rejected(reason) if u.row.update_id in revoked else u)


class Stale(Screen):
    """Reject updates whose version has been rolled back since, or is too old after a change of the mode."""

    def __init__(self, state: HubState, config: ServerConfig) -> None:
        self._known = known_versions(state, config.rounds)

    def apply(self, screened: ScreenedRound) -> ScreenedRound:
        reason = "the version that it starts from was rolled back, or is too old"
        finding = FreeRiderFinding(reason, cheating=False, blameless=True)
        stale = {
            update.row.update_id: finding
            for update in screened.updates
            if update.manifest.base_digest not in self._known
        }
        found = screened.each(lambda u: u.rejected(reason) if u.row.update_id in stale else u)
        return replace(found, findings={**screened.findings, **stale})


class FileScreen(Screen):
    """Reject updates by the content of their files; the reason replaces that of an earlier screen."""

    base: BaseSpec | None = None
    cheating = False
    """True if such a file can only result from cheating."""

    @abstractmethod
    def flaw(self, delta: DeltaFile, update: ScreenedUpdate) -> str | None:
        """Return why an update is rejected, or None if it passes."""

    def apply(self, screened: ScreenedRound) -> ScreenedRound:
        return screened.each(self._judged)

    def _judged(self, update: ScreenedUpdate) -> ScreenedUpdate:
        with DeltaFile.open(update.path, self.base) as delta:
            reason = self.flaw(delta, update)
        return update if reason is None else update.rejected(reason, self.cheating)


class FactorRank(FileScreen):
    """Reject updates that are not LoRA factors, or whose rank exceeds that of their own task.

    In a continuous round, an update's task may be older than the recipe of the round that merges it.
    """

    def __init__(self, spec: TaskSpec, database: Database) -> None:
        self._specs, self._database = {spec.server_round: spec}, database

    def flaw(self, delta: DeltaFile, update: ScreenedUpdate) -> str | None:
        number = update.manifest.server_round
        if number not in self._specs:
            with self._database.reading() as tx:
                text = tx.scalar(select(rounds.c.spec).where(rounds.c.server_round == number))
            self._specs[number] = TaskSpec.model_validate_json(str(text))
        spec = self._specs[number]
        return not_low_rank(delta, spec) if spec.recipe.sends_factors else None


class FrozenA(FileScreen):
    """Reject LoRA factors whose A differs from the one that the round's seed generates."""

    cheating = True

    def __init__(self, spec: TaskSpec, base: BaseSpec) -> None:
        self._spec, self.base = spec, base

    def flaw(self, delta: DeltaFile, update: ScreenedUpdate) -> str | None:
        name = foreign_a(delta, self._spec)
        what = "its A is not the one generated by the round's seed (lora.freeze_a)"
        return None if name is None else f"tensor {name!r}: {what}"


class TrainedTensors(FileScreen):
    """Reject, in a private round, updates with tensors that the task does not train."""

    def __init__(self, spec: TaskSpec, base: BaseSpec) -> None:
        self._trained = set(private_merge.trained_tensors(spec.recipe, base))

    def flaw(self, delta: DeltaFile, update: ScreenedUpdate) -> str | None:
        others = (name for name in delta.names if name not in self._trained)
        return next((f"tensor {name!r} is not one that the task trains" for name in others), None)


class FreeRiders(Screen):
    """Reject zeros and stale updates, which would earn credits for no work: ``gym_server.rewards.free_riders``."""

    def __init__(self, state: HubState, config: ServerConfig, server_round: int) -> None:
        self._state, self._config = state, config
        self._server_round = server_round

    def apply(self, screened: ScreenedRound) -> ScreenedRound:
        rows = [update.row for update in screened.kept]
        findings = free_riders(self._state, self._config, rows, self._server_round)

        def judged(update: ScreenedUpdate) -> ScreenedUpdate:
            finding = findings.get(update.row.update_id)
            return update if finding is None else update.rejected(finding.reason, finding.cheating)

        return replace(screened.each(judged), findings={**screened.findings, **findings})


class Duplicates(Screen):
    """Set aside duplicates, all but the first update of each group; it must be the last screen.

    Updates that earlier screens reject are not compared, so that a bad copy cannot displace the original.
    """

    def __init__(self, state: HubState, config: ServerConfig, server_round: int) -> None:
        self._state, self._config = state, config
        self._server_round = server_round

    def apply(self, screened: ScreenedRound) -> ScreenedRound:
        rows = [update.row for update in screened.kept]
        findings, similarity = duplicates(self._state, self._config, rows, self._server_round)
        found = screened.each(
            lambda u: u.duplicate(findings[u.row.update_id].reason) if u.row.update_id in findings else u
        )
        return replace(found, findings={**screened.findings, **findings}, similarity=similarity)


class LargeNorms(Screen):
    """Reject norms far above the median of the round or its window, if there are enough updates for a median."""

    def __init__(self, ratio: float, state: HubState, config: ServerConfig) -> None:
        self._ratio, self._state, self._config = ratio, state, config

    def apply(self, screened: ScreenedRound) -> ScreenedRound:
        kept = screened.kept
        norms = [update.row.norm for update in kept] + self._other_norms(kept)
        if len(norms) < MIN_FOR_NORM_SCREEN:
            return screened
        verdicts = screen_norms(norms, self._ratio)
        reasons = {
            update.row.update_id: verdict.reason
            for update, verdict in zip(kept, verdicts, strict=False)
            if not verdict.accepted
        }
        return screened.each(
            lambda u: u.rejected(reasons[u.row.update_id]) if u.row.update_id in reasons else u
        )

    def _other_norms(self, kept: Sequence[ScreenedUpdate]) -> list[float]:
        """Return the norms of the updates that are only in the window of a continuous round."""
        window = round_window(self._state, self._config.rounds, [update.manifest for update in kept])
        ids = [] if window is None else [one.digest for one in window.others]
        with self._state.database.reading() as tx:
            return list(tx.scalars(select(updates.c.norm).where(updates.c.update_id.in_(ids))))


class HeldOutLoss(Screen):
    """Apply each update alone, at the weight it would have in the soup, and reject it if the held-out loss rises.

    At full weight, an honest update trained on unusual data would also raise the loss, since it forgets other data. At
    its share of the soup, only a step in a wrong direction does.
    """

    def __init__(self, state: HubState, config: ServerConfig, model: HubModel) -> None:
        self._state, self._config = state, config
        self.on_update: Callable[[], object] = lambda: None
        """Function called after each checked update."""
        self._model = model
        self._learning_rate = config.soup.server_learning_rate
        self._allowed = config.gate.max_update_loss_increase

    def apply(self, screened: ScreenedRound) -> ScreenedRound:
        before = self._model.loss()
        share = self._learning_rate / self._num_weighed(screened.kept)
        return screened.each(lambda update: self._judged(update, before, share) if update.kept else update)

    def _num_weighed(self, kept: Sequence[ScreenedUpdate]) -> int:
        """Return the divisor of the soup; in a continuous round it is the same as in ``RoundWindow.added``."""
        window = round_window(self._state, self._config.rounds, [update.manifest for update in kept])
        least = 1 if window is None else min(window.merge_every, len(kept) + len(window.others))
        return max(1, len(kept), least)

    def _judged(self, update: ScreenedUpdate, before: float, share: float) -> ScreenedUpdate:
        after = self._model.loss_with(update.path, share)
        self.on_update()
        if math.isfinite(after - before):  # a ledger entry cannot hold a NaN
            judgement = replace(update.judgement, heldout_change=after - before)
            update = replace(update, judgement=judgement)
        if is_no_worse(before, after, self._allowed):
            return update
        return update.rejected(
            f"its share of the soup alone raises the held-out loss from {before:.3f} to {after:.3f}; "
            f"allowed: +{self._allowed:g}"
        )


def is_no_worse(before: float, after: float, allowed: float) -> bool:
    """Return True if a loss rose by at most ``allowed``; False for NaN and infinity, which large weights can cause."""
    return math.isfinite(before) and math.isfinite(after) and after - before <= allowed
