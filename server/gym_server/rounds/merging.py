"""Merge a round's frozen list of updates into a committed version, or abort the round with a reason.

Everything before the commit can be repeated: the same updates and recipe give the same soup, bit for bit.
"""

from __future__ import annotations

import errno
import functools
import logging
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sqlalchemy import Connection

from gym_fed.config.hub.server import ServerConfig
from gym_fed.config.hub.task import next_digest
from gym_fed.config.schema.plugins import as_json
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.core.failpoints import failpoint
from gym_fed.core.portable import memory_given_back
from gym_fed.core.text import counted
from gym_fed.evaluation.loss import RowLosses
from gym_server.accounts.keys import Keys
from gym_server.evaluations.gate import RoundEvaluation, evaluation_of
from gym_server.evaluations.safety import RoundSafety, safety_of
from gym_server.ledger.chain import Ledger
from gym_server.privacy import budget as privacy
from gym_server.privacy import merge as private_merge
from gym_server.privacy.secure_unmask import secure_ingredient
from gym_server.rewards.appraisal import Appraisal, appraise, reputation_weights
from gym_server.rewards.scores import DIGITS, ScoringStopped
from gym_server.rounds.continuous import round_window
from gym_server.rounds.evidence import find_evidence
from gym_server.rounds.hub_model import HubModel
from gym_server.rounds.merge_progress import MergeProgress, num_tensors
from gym_server.rounds.root import root_update
from gym_server.rounds.round_store import Round
from gym_server.rounds.screens import ScreenedRound, ScreenedUpdate, is_no_worse, screen_updates
from gym_server.rounds.soup_record import SoupRecord
from gym_server.rounds.soups import RESIDUAL, Ingredients, Soup, discard, make_soup, residual_name, soup_path
from gym_server.rounds.sums import stored_sum
from gym_server.state import HubState

log = logging.getLogger("gym_server")


@memory_given_back()
def merge_round(
    state: HubState,
    config: ServerConfig,
    keys: Keys,
    model: HubModel,
    current: Round,
    should_stop: Callable[[], bool] = lambda: False,
) -> None:
    """Screen, merge, gate and score a round in state merging, then commit or abort it.

    Pay and free-rider screens follow the terms that the round's task announced, even if the config has changed.

    Raises:
        ScoringStopped: If ``should_stop`` returned True while updates were scored; nothing is committed then.
    """
    if current.spec is not None:
        rewards = config.rewards.under(current.spec.pay)
        config = config.model_copy(update={"rewards": rewards})
    if privacy.is_spent(config, state.database):
        state.round_store.abort(current.server_round, privacy.SPENT)
        return
    progress = MergeProgress(state.database)
    try:
        _merge_round(state, config, keys, model, current, should_stop, progress)
    finally:
        progress.end()


def _merge_round(
    state: HubState,
    config: ServerConfig,
    keys: Keys,
    model: HubModel,
    current: Round,
    should_stop: Callable[[], bool],
    progress: MergeProgress,
) -> None:
    screened = screen_updates(state, config, keys, model, current, progress)
    spending: Callable[[Connection], None] = _nothing_to_write
    try:
        screened = _enough_for_the_rule(state, config, screened)
        spending = privacy.spending(
            state, config, current.server_round, [u.row.contributor for u in screened.kept]
        )
        merged = _merge(state, config, model, current, screened.kept, progress)
        losses = _pass_gate(config, model, merged.soup, progress)
        progress.begin("evaluating")
        safety = _pass_safety(config, state.folder, state.ledger, model, merged)
        evaluation = _pass_evaluations(state, config, model, current, merged, safety)
    except _RoundAborted as aborted:
        discard(state.folder, current.server_round)
        write = functools.partial(_write_all, [spending, aborted.record])
        state.round_store.abort(current.server_round, aborted.reason, screened.rejections, write)
        return
    progress.begin("writing the soup")
    state.store.put_file(merged.soup.path)
    merged.soup.path.unlink()
    progress.begin("scoring updates")
    added = None
    if config.rewards.score_on == "evals":
        added = _added_to_evaluations(state, config, merged, evaluation, should_stop)
    appraisal = appraise(
        state,
        config,
        model,
        current.server_round,
        [(update.row, update.judgement) for update in screened.updates],
        screened.findings,
        screened.similarity,
        merged.soup.report.coefficients,
        merged.ingredients.weights,
        losses.rows,
        should_stop,
        added,
        merged.soup.report.admitted,
    )
    failpoint("before-commit")
    state.round_store.commit(
        current, _soup_record(current, merged, losses, appraisal, (safety, evaluation)), spending
    )
    failpoint("after-commit")


def _nothing_to_write(tx: Connection) -> None:
    """Do nothing; the default if a round has no privacy costs or evaluation to record."""


def _write_all(writes: Sequence[Callable[[Connection], None]], tx: Connection) -> None:
    for write in writes:
        write(tx)


class _RoundAborted(Exception):
    """Raised to end a round without a version; ``record`` writes in the transaction that stores ``reason``."""

    def __init__(self, reason: str, record: Callable[[Connection], None] = _nothing_to_write) -> None:
        super().__init__(reason)
        self.reason = reason
        self.record = record


@dataclass(frozen=True)
class _MergedRound:
    """A soup that is not committed yet, with its inputs, its integer sum and the digests of the server's new state."""

    ingredients: Ingredients
    soup: Soup
    state: dict[str, str]
    integers: Mapping[str, Any] | None

    @property
    def version(self) -> str:
        """Digest of the version that the soup creates."""
        parent, integers = self.ingredients.parent.digest, (self.integers or {}).get("digest")
        return next_digest(parent, self.soup.report.sha256, self.ingredients.server_round, integers)


@dataclass(frozen=True)
class _HeldOutLosses:
    """Held-out losses of the versions before and after the round; None if there is no held-out data."""

    rows: tuple[RowLosses, RowLosses] | None = None

    @property
    def before(self) -> float | None:
        return self.rows[0].mean if self.rows else None

    @property
    def after(self) -> float | None:
        return self.rows[1].mean if self.rows else None


def _enough_for_the_rule(state: HubState, config: ServerConfig, screened: ScreenedRound) -> ScreenedRound:
    """Return the round, with duplicates merged too if the rule would otherwise have too few updates."""
    if not screened.kept:
        raise _RoundAborted("no update passed the checks; each update's verdict has the reason")

    def check(kept: Sequence[ScreenedUpdate]) -> None:
        window = round_window(state, config.rounds, [update.manifest for update in kept])
        config.soup.check_feasible(len(kept) + (0 if window is None else len(window.others)))

    try:
        check(screened.kept)
    except GymError:
        screened = screened.with_duplicates()
    try:
        check(screened.kept)
    except GymError as error:
        raise _RoundAborted(
            f"{counted(len(screened.kept), 'update')} passed the screens: {error.message}"
        ) from error
    return screened


def _merge(
    state: HubState,
    config: ServerConfig,
    model: HubModel,
    current: Round,
    kept: Sequence[ScreenedUpdate],
    progress: MergeProgress,
) -> _MergedRound:
    """Create the soup and stage the server's new state.

    Raises:
        OSError: If the disk is full. The round is not aborted, and continues from here once there is space.
    """
    try:
        if config.root is not None:
            progress.begin("training on the root data")
        ingredients = _ingredients(state, config, model, current, kept, progress)
        masked = config.secure_aggregation is not None
        progress.begin("merging tensors", 0 if masked else num_tensors(update.path for update in kept))
        soup = make_soup(state, ingredients, soup_path(state.folder, current.server_round), progress.step)
        integers = stored_sum(state, ingredients, soup.path)
        progress.begin("writing the server's state")
        return _MergedRound(ingredients, soup, soup.stage(state, current.server_round), integers)
    except GymError as error:
        if error.code is ErrorCode.DISK_FULL:
            discard(state.folder, current.server_round)
            raise OSError(errno.ENOSPC, error.message) from error
        why = error.code.value if config.privacy else error.message  # a message may quote submitted values
        raise _RoundAborted(f"the merge failed: {why}") from error


def _ingredients(
    state: HubState,
    config: ServerConfig,
    model: HubModel,
    current: Round,
    kept: Sequence[ScreenedUpdate],
    progress: MergeProgress,
) -> Ingredients:
    manifests = [update.manifest for update in kept]
    recipe, ids = config.soup.for_round(current.server_round), [update.row.update_id for update in kept]
    weights = reputation_weights(
        config, state.database, state.round_store, [update.row.contributor for update in kept]
    )
    root = root_update(state, config, model, current)
    shares = weights or recipe.weights([manifest.num_examples for manifest in manifests])
    return Ingredients(
        server_round=current.server_round,
        parent=state.round_store.head(),
        recipe=recipe,
        manifests=manifests,
        root=root,
        weights=weights,
        evidence=find_evidence(state, config, model, recipe, kept, shares, root, progress),
        private=private_merge.begin_merge(config, state.base, state.database, current.spec, ids, root),
        secure=secure_ingredient(state, config, current, manifests),
        window=round_window(state, config.rounds, manifests),
    )


def _pass_gate(config: ServerConfig, model: HubModel, soup: Soup, progress: MergeProgress) -> _HeldOutLosses:
    """Roll back a soup that raises the held-out loss by more than ``gate.max_loss_increase``."""
    if not model.has_gate:
        return _HeldOutLosses()
    progress.begin("checking the held-out loss", 2)
    start = model.losses()
    progress.step()
    rows = start, model.losses_with(soup.path)
    before, after, limit = rows[0].mean, rows[1].mean, config.gate.max_loss_increase
    if not is_no_worse(before, after, limit):
        raise _RoundAborted(
            f"rolled back: the soup raises the held-out loss from {before:.4f} to {after:.4f}; allowed: +{limit:g}"
        )
    return _HeldOutLosses(rows)


def _pass_safety(
    config: ServerConfig, folder: Path, ledger: Ledger, model: HubModel, merged: _MergedRound
) -> RoundSafety | None:
    """Roll back a soup that significantly lowers the refusal margin, by more than ``gate.safety`` allows."""
    with _finite():
        safety = safety_of(
            config, folder, ledger, model, merged.ingredients.server_round, merged.soup, merged.version
        )
    if safety is not None and safety.reason:
        raise _RoundAborted(safety.reason, functools.partial(safety.write, "rolled back"))
    return safety


def _pass_evaluations(
    state: HubState,
    config: ServerConfig,
    model: HubModel,
    current: Round,
    merged: _MergedRound,
    safety: RoundSafety | None,
) -> RoundEvaluation | None:
    """Roll back a soup that significantly lowers a task's score, by more than its suite allows."""
    evaluation = evaluation_of(state, config, model, current.server_round)
    if evaluation is None:
        return None
    with _finite():
        reason = evaluation.run(merged.soup, merged.version)
    if reason:
        writers = [one.write for one in (safety, evaluation) if one is not None]
        raise _RoundAborted(
            reason,
            functools.partial(_write_all, [functools.partial(write, "rolled back") for write in writers]),
        )
    return evaluation


@contextmanager
def _finite() -> Iterator[None]:
    """Roll back a soup for which the model returns non-finite probabilities, without recording an evaluation."""
    try:
        yield
    except GymError as error:
        if error.code is not ErrorCode.MODEL_INVALID:
            raise
        raise _RoundAborted(f"rolled back: with the soup {error.message}") from error


def _added_to_evaluations(
    state: HubState,
    config: ServerConfig,
    merged: _MergedRound,
    evaluation: RoundEvaluation | None,
    should_stop: Callable[[], bool],
) -> dict[str, float] | None:
    """Return, for each update, how much the soup's evaluation score drops without it; None without evaluations.

    The result is empty if the rules cannot merge one update fewer, or if the probabilities without an update are not
    finite. No credits are then split by evaluations.

    Raises:
        ScoringStopped: If ``should_stop`` returned True.
    """
    if evaluation is None:
        return None
    ingredients, found = merged.ingredients, dict[str, float]()
    try:
        config.soup.check_feasible(ingredients.num_weighed - 1)
    except GymError as error:
        log.warning("round %d: no credits by evaluations: %s", ingredients.server_round, error.message)
        return found
    for number, manifest in enumerate(ingredients.manifests):
        if should_stop():
            raise ScoringStopped
        with tempfile.TemporaryDirectory(dir=state.folder / "staging", prefix="rescore-") as folder:
            try:
                soup = make_soup(state, ingredients.without(number), Path(folder) / "soup.gymdelta")
                value = evaluation.value_with(soup)
            except GymError as error:  # not a reason to abort the round or to stop the hub
                if error.code not in (ErrorCode.MODEL_INVALID, ErrorCode.CONFIG_INVALID):
                    raise
                log.warning(
                    "round %d: no credits by evaluations: %s", ingredients.server_round, error.message
                )
                return {}
        found[manifest.digest] = round(evaluation.value - value, DIGITS)
    return found


def _soup_record(
    current: Round,
    merged: _MergedRound,
    losses: _HeldOutLosses,
    appraisal: Appraisal,
    probes: Sequence[RoundSafety | RoundEvaluation | None],
) -> SoupRecord:
    report, ingredients = merged.soup.report, merged.ingredients
    return SoupRecord(
        sha256=report.sha256,
        size_bytes=report.size_bytes,
        recipe=ingredients.recipe.model_dump(mode="json"),
        root=ingredients.root,
        heldout_before=losses.before,
        heldout_after=losses.after,
        residual=residual_name(current.server_round) if RESIDUAL in merged.state else None,
        state=merged.state,
        judgements=appraisal.judgements,
        weights=ingredients.weight_of(),
        also=[appraisal.record, *(probe.on_commit() for probe in probes if probe is not None)],
        privacy=private_merge.entry_fields(ingredients.private, report.private),
        secure=ingredients.secure.entry_fields() if ingredients.secure else None,
        evidence=ingredients.evidence.entry_fields() if ingredients.evidence else None,
        window=None if ingredients.window is None else ingredients.window.entry_fields(ingredients.manifests),
        plugins=as_json(merged.soup.plugins),
        integers=merged.integers,
    )
