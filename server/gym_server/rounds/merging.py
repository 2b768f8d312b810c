"""From a round's frozen list of updates to a committed version, or to an abort with its reason.

Everything before the commit can be done again: the same updates and recipe give the same soup, byte for byte.
"""

from __future__ import annotations

import errno
import logging
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from sqlalchemy import select

from gym_fed.config.schema.plugins import as_json
from gym_fed.delta.base import BaseSpec
from gym_fed.delta.file import DeltaFile
from gym_fed.errors import ErrorCode, GymError
from gym_fed.failpoints import failpoint
from gym_fed.identity.manifest import UpdateManifest
from gym_fed.soup.sybils.screening import NormVerdict, screen_norms
from gym_server.federation import Federation
from gym_server.privacy import budget as privacy
from gym_server.privacy import merge as private_merge
from gym_server.privacy.secure_unmask import secure_ingredient
from gym_server.rewards.appraisal import appraise, reputation_weights
from gym_server.rewards.free_riders import FreeRiderFinding, RoundSimilarity, free_riders
from gym_server.rounds.hub_model import HubModel
from gym_server.rounds.lora_updates import foreign_a, not_low_rank
from gym_server.rounds.root import root_update
from gym_server.rounds.round_store import Judgement, Round, SoupRecord
from gym_server.rounds.soups import RESIDUAL, Ingredients, discard, make_soup, residual_name, soup_path
from gym_server.store.tables import updates

log = logging.getLogger("gym_server")

MIN_FOR_NORM_SCREEN = 3


@dataclass(frozen=True)
class _Update:
    """An admitted update while it is judged."""

    row: Any
    path: Path
    judgement: Judgement

    @property
    def kept(self) -> bool:
        return self.judgement.verdict == "merged"

    def rejected(self, reason: str, cheating: bool = False) -> _Update:
        judgement = replace(self.judgement, verdict="rejected", reason=reason, cheating=cheating)
        return replace(self, judgement=judgement)


def merge_round(
    fed: Federation, model: HubModel, current: Round, should_stop: Callable[[], bool] = lambda: False
) -> None:
    """Screen, merge, gate, score, and commit or abort. ``current`` is in state merging.

    Raises:
        ScoringStopped: When ``should_stop`` said so while updates were scored; nothing is committed then.
    """
    if privacy.is_spent(fed):
        fed.round_store.abort(current.server_round, privacy.SPENT)
        return
    loaded = _screen_low_rank(current, _screen_revoked(fed, _load(fed, current)))
    judged = _screen_untrained(fed, current, _screen_frozen_a(current, model, loaded))
    judged, findings, similarity = _screen_free_riders(fed, current, judged)
    judged = _screen_norms(fed, judged)
    judged = _screen_heldout(fed, model, judged)
    kept = [u for u in judged if u.kept]
    rejected = [u.judgement for u in judged if not u.kept]
    try:
        fed.config.soup.check_feasible(len(kept))
    except GymError as error:
        discard(fed, current.server_round)
        fed.round_store.abort(
            current.server_round, f"{len(kept)} updates passed the screens: {error.message}", rejected
        )
        return
    spending = privacy.spending(fed, current.server_round, [u.row.contributor for u in kept])
    try:
        ingredients = _ingredients(fed, model, current, kept)
        soup = make_soup(fed, ingredients, soup_path(fed, current.server_round))
        state = soup.stage(fed, current.server_round)
    except GymError as error:
        discard(fed, current.server_round)
        if (
            error.code is ErrorCode.DISK_FULL
        ):  # not the round's fault: it goes on from here when there is space
            raise OSError(errno.ENOSPC, error.message) from error
        why = error.code.value if fed.config.privacy else error.message  # a message may quote what was sent
        fed.round_store.abort(current.server_round, f"the merge failed: {why}", rejected, spending)
        return
    before = model.loss() if model.has_gate else None
    after = model.loss_with(soup.path) if model.has_gate else None
    limit = fed.config.gate.max_loss_increase
    if before is not None and after is not None and not _is_no_worse(before, after, limit):
        reason = f"rolled back: held-out loss {before:.4f} > {after:.4f}, allowed is +{limit:g}"
        discard(fed, current.server_round)
        fed.round_store.abort(current.server_round, reason, rejected, spending)
        return
    fed.store.put_file(soup.path)
    soup.path.unlink()
    appraisal = appraise(
        fed,
        model,
        current.server_round,
        [(u.row, u.judgement) for u in judged],
        findings,
        similarity,
        soup.report.coefficients,
        ingredients.weights,
        should_stop,
    )
    failpoint("before-commit")
    fed.round_store.commit(
        current,
        SoupRecord(
            sha256=soup.report.sha256,
            size_bytes=soup.report.size_bytes,
            recipe=ingredients.recipe.model_dump(mode="json"),
            root=ingredients.root,
            heldout_before=before,
            heldout_after=after,
            residual=residual_name(current.server_round) if RESIDUAL in state else None,
            state=state,
            judgements=appraisal.judgements,
            weights=ingredients.weight_of(),
            also=[appraisal.record],
            privacy=private_merge.told_of(ingredients.private, soup.report.private),
            secure=ingredients.secure.told() if ingredients.secure else None,
            plugins=as_json(soup.plugins),
        ),
        spending,
    )
    failpoint("after-commit")


def _load(fed: Federation, current: Round) -> list[_Update]:
    with fed.database.reading() as tx:
        rows = tx.execute(
            select(updates).where(updates.c.update_id.in_(current.merging)).order_by(updates.c.update_id)
        ).all()
    return [
        _Update(
            row,
            fed.store.local_path(row.delta_sha256),
            Judgement(row.update_id, row.contributor, "merged", ""),
        )
        for row in rows
    ]


def _screen_revoked(fed: Federation, judged: list[_Update]) -> list[_Update]:
    revoked = fed.keys.signed_by_revoked([update.row for update in judged])
    reason = "the key was revoked before the merge"
    return [u.rejected(reason) if u.row.update_id in revoked else u for u in judged]


def _screen_files(
    judged: list[_Update],
    flaw: Callable[[DeltaFile], str | None],
    base: BaseSpec | None = None,
    cheating: bool = False,
) -> list[_Update]:
    """Reject every update in whose file ``flaw`` finds one."""
    screened = []
    for update in judged:
        with DeltaFile.open(update.path, base) as delta:
            reason = flaw(delta)
        screened.append(update if reason is None else update.rejected(reason, cheating))
    return screened


def _screen_low_rank(current: Round, judged: list[_Update]) -> list[_Update]:
    spec = current.spec
    if spec is None or not spec.recipe.sends_factors:
        return judged
    return _screen_files(judged, lambda delta: not_low_rank(delta, spec))


def _screen_frozen_a(current: Round, model: HubModel, judged: list[_Update]) -> list[_Update]:
    spec = current.spec
    if spec is None or not spec.recipe.sends_factors or not spec.recipe.lora.freeze_a:
        return judged

    def foreign(delta: DeltaFile) -> str | None:
        name = foreign_a(delta, spec)
        what = "its A is not the one that the round's seed gives (lora.freeze_a)"
        return None if name is None else f"tensor {name!r}: {what}"

    return _screen_files(judged, foreign, model.spec, cheating=True)


def _screen_free_riders(
    fed: Federation, current: Round, judged: list[_Update]
) -> tuple[list[_Update], dict[str, FreeRiderFinding], RoundSimilarity]:
    """Zeros, copies and stale updates neither weigh in the soup nor earn; see ``gym_server.rewards.free_riders``."""
    if fed.config.secure_aggregation is not None:
        return (
            judged,
            {},
            RoundSimilarity(),
        )  # masked votes have no norms and angles, and the config needs none
    findings, similarity = free_riders(fed, [u.row for u in judged if u.kept], current.server_round)
    screened = []
    for update in judged:
        finding = findings.get(update.row.update_id)
        screened.append(update if finding is None else update.rejected(finding.reason, finding.cheating))
    return screened, findings, similarity


def _screen_untrained(fed: Federation, current: Round, judged: list[_Update]) -> list[_Update]:
    if fed.config.privacy is None or current.spec is None or fed.config.secure_aggregation is not None:
        return judged
    trained = set(private_merge.trained_tensors(current.spec.recipe, fed.base))

    def untrained(delta: DeltaFile) -> str | None:
        others = (name for name in delta.names if name not in trained)
        return next((f"tensor {name!r} is not one that the task trains" for name in others), None)

    return _screen_files(judged, untrained)


def _screen_norms(fed: Federation, judged: list[_Update]) -> list[_Update]:
    ratio = fed.config.admission.norm_ratio
    if ratio is None or sum(u.kept for u in judged) < MIN_FOR_NORM_SCREEN:
        return judged
    kept = [u for u in judged if u.kept]
    verdicts = iter(screen_norms([u.row.norm for u in kept], ratio))
    return [_norm_judged(u, next(verdicts)) if u.kept else u for u in judged]


def _norm_judged(update: _Update, verdict: NormVerdict) -> _Update:
    return update if verdict.accepted else update.rejected(verdict.reason)


def _screen_heldout(fed: Federation, model: HubModel, judged: list[_Update]) -> list[_Update]:
    """Try each update alone, at the weight it would have in the soup; what makes the loss worse stays out.

    At full weight an honest update of a contributor with unusual data looks harmful too, since it forgets what
    the others know; at its share only a step in a wrong direction does.
    """
    gate = fed.config.gate
    if not (gate.screen_updates and model.has_gate):
        return judged
    before = model.loss()
    share = fed.config.soup.server_learning_rate / max(1, sum(u.kept for u in judged))
    screened = []
    for update in judged:
        if update.kept:
            after = model.loss_with(update.path, share)
            if math.isfinite(after - before):  # no entry of the ledger holds a NaN
                judgement = replace(update.judgement, heldout_change=after - before)
                update = replace(update, judgement=judgement)
            if not _is_no_worse(before, after, gate.max_update_loss_increase):
                update = update.rejected(
                    f"its share of the soup alone takes the held-out loss from {before:.3f} to {after:.3f}; "
                    f"allowed is +{gate.max_update_loss_increase:g}"
                )
        screened.append(update)
    return screened


def _is_no_worse(before: float, after: float, allowed: float) -> bool:
    """NaN and infinity are worse than anything: large finite weights lead to both."""
    return math.isfinite(before) and math.isfinite(after) and after - before <= allowed


def _ingredients(fed: Federation, model: HubModel, current: Round, kept: list[_Update]) -> Ingredients:
    return Ingredients(
        server_round=current.server_round,
        parent=fed.round_store.head(),
        recipe=fed.config.soup.for_round(current.server_round),
        manifests=[UpdateManifest.parse(update.row.manifest) for update in kept],
        root=root_update(fed, model, current.server_round),
        weights=reputation_weights(fed, [update.row.contributor for update in kept]),
        private=private_merge.begin_merge(fed, current.spec, [update.row.update_id for update in kept]),
        secure=secure_ingredient(
            fed, current, [UpdateManifest.parse(update.row.manifest) for update in kept]
        ),
    )
