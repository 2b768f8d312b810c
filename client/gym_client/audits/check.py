"""The auditor's side of an audit: repeat the drawn steps of an answer, and sign a verdict."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from gym_client.agent.global_model import GlobalModel
from gym_client.agent.version_sum import VersionSum
from gym_client.audits.answer import AuditAnswer, invalid
from gym_client.audits.draws import Draw
from gym_fed.config.hub.round_training import round_training
from gym_fed.config.hub.task import TaskSpec, first_summed
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.core.json_files import canonical_digest
from gym_fed.core.text import counted
from gym_fed.trust.identity.keys import SigningKey
from gym_fed.trust.ledger.audits import AuditVerdict, SignedVerdict

_MOST = 1e30
"""Upper limit for reported distances; replaces infinity and NaN, which JSON cannot represent."""
_ROUNDING = 1e-6
"""Tolerance between the delta and the auditor's encoding of the final state, due to rounding in both."""


def repeat_steps(
    answer: AuditAnswer,
    draw: Draw,
    model: GlobalModel,
    soup_path: Callable[[str], Path],
    public_rows: Iterable[dict[str, Any]] | None,
    device: str = "auto",
) -> tuple[dict[int, float], str]:
    """Repeat the drawn steps of an update with gym-fed's own training step.

    Args:
        answer: The contributor's answer.
        draw: The draw that the answer is for.
        model: The federation's base.
        soup_path: Returns the file of a soup, or of the sum of additive soups, by its sha256.
        public_rows: The auditor's own copy of the public rows; None if the answer contains the rows.
        device: Device for the training steps.

    Returns:
        The distance of each drawn step, by step number, and the reason why the audit failed; empty if it passed.

    Raises:
        GymError: ``AUDIT_INVALID`` for states that differ from the committed ones; errors from the model and the rows.
    """
    if public_rows is not None:
        known = {canonical_digest(row) for row in public_rows}
        for number, row in enumerate(answer.document.rows, 1):
            if canonical_digest(row) not in known:
                return {}, f"training row {number} is not one of the public rows"
    from gym_fed.training.audits.replay import StepReplay
    from gym_fed.training.audits.states import put_weights, trained_parameters
    from gym_fed.training.trainer import Trainer

    spec = answer.document.task
    replay = StepReplay(draw.steps, answer.batches(), answer.state, draw.terms.tolerance)
    with tempfile.TemporaryDirectory() as folder:
        model.advance(spec, soup_path, fetched_sum(spec, soup_path, Path(folder) / "versions"))
        config = round_training(spec.recipe, spec.server_round, Path(folder) / "run", device)
        trainer = Trainer(
            config.model_copy(update={"save_steps": draw.num_steps + 1}),
            model=model.model,
            tokenizer=model.tokenizer,
            observer=replay,
        )
        try:
            result = trainer.train(dataset=answer.document.rows)
            final = answer.state(draw.num_steps, replay.num_weights)
            put_weights(trained_parameters(result.model), final)
            claimed = answer.document.manifest.num_examples
            if result.num_examples != claimed:
                replay.report.fail(
                    f"the update claims {counted(claimed, 'example')}, but these rows have {result.num_examples}"
                )
            if not replay.report.problem and not _is_encoded(answer, spec, model, result.model, Path(folder)):
                replay.report.fail("the delta does not match the final state of the training")
            result.model.unload()
        finally:
            model.restore()
    return replay.report.distances, replay.report.problem


def _is_encoded(answer: AuditAnswer, spec: TaskSpec, model: GlobalModel, tuned: Any, folder: Path) -> bool:
    """Return True if the update's delta contains the factors of ``tuned``, rounded by its codec."""
    from gym_fed.delta.encode import lora_delta
    from gym_fed.delta.file import DeltaFile
    from gym_fed.training.tuning.lora import lora_factors

    version = model.version_spec(spec)
    own, sent = folder / "own.gymdelta", folder / "sent.gymdelta"
    lora_delta(lora_factors(tuned), own, version, policy=spec.codec)
    sent.write_bytes(answer.delta)
    try:
        with DeltaFile.open(own, version) as ours, DeltaFile.open(sent, version) as theirs:
            if set(ours.names) != set(theirs.names):
                return False
            for name in ours.names:
                expected = ours.decode(name)
                difference = float((theirs.decode(name) - expected).norm())
                if not difference <= _ROUNDING * float(expected.norm()):
                    return False
    except GymError as error:
        raise invalid(answer.path, f"its delta: {error.message}") from error
    return True


def fetched_sum(spec: TaskSpec, soup_path: Callable[[str], Path], folder: Path) -> VersionSum:
    """Return a sum in a new folder, with a copy of the downloaded sum if the task's soups are additive."""
    folder.mkdir()
    sums = VersionSum(folder)
    if spec.soups and (name := spec.soups[-1].sum_sha256) is not None:
        parents = [spec.base_digest, *(soup.version_digest for soup in spec.soups)]
        shutil.copy(soup_path(name), sums.combined(parents[first_summed(spec.soups)], parents[-1]))
    return sums


def signed_verdict(
    draw: Draw, server: str, key: SigningKey, now: float, distances: dict[int, float], problem: str
) -> SignedVerdict:
    """Sign the verdict on an audit. ``problem`` is empty if the audit passed."""
    finite = {str(step): distance if distance < _MOST else _MOST for step, distance in distances.items()}
    verdict = AuditVerdict(
        auditor=key.contributor,
        server=server,
        server_round=draw.server_round,
        update=draw.update,
        outcome="failed" if problem else "passed",
        reason=problem[:500],
        distances=finite,
        tolerance=draw.terms.tolerance,
        issued_at_seconds=int(now),
    )
    return SignedVerdict.of(verdict, key)


def unanswered(draw: Draw, server: str, key: SigningKey, now: float) -> SignedVerdict:
    """Sign a verdict that the contributor did not answer in time.

    Raises:
        GymError: ``USAGE`` before the deadline for the answer.
    """
    left = draw.drawn_at + draw.terms.answer_seconds - now
    if left > 0:
        raise GymError(
            ErrorCode.USAGE,
            f"the contributor of update {draw.update[:12]} has {left / 3600:.1f} more hours to answer",
            "wait, then run the command again",
        )
    verdict = AuditVerdict(
        auditor=key.contributor,
        server=server,
        server_round=draw.server_round,
        update=draw.update,
        outcome="unanswered",
        reason="the contributor did not answer in time",
        tolerance=draw.terms.tolerance,
        issued_at_seconds=int(now),
    )
    return SignedVerdict.of(verdict, key)
