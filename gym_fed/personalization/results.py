"""Results of creating or rebasing a variant, and the progress listener. Does not import torch."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gym_fed.core.errors import ErrorCode, GymError

if TYPE_CHECKING:
    from gym_fed.data.row_counts import RowCounts
    from gym_fed.training.run.hooks import StepReport


AGAIN = "run the same command again to resume"


class Listener:
    """The base class of progress listeners, which may stop the work. It ignores all events."""

    def phase(self, what: str) -> None:
        """Called when a phase begins."""

    def rows(self, name: str, counts: RowCounts, max_length: int) -> None:
        """Called with the row counts before training. ``name`` is ``data`` or ``eval_data`` (held-out rows)."""

    def trained(self, report: StepReport) -> None:
        """Called after each training step and each evaluation."""

    def distilled(self, step: int, total: int, loss: float) -> None:
        """Called after each step of scale distillation."""

    def should_stop(self) -> bool:
        """Called after every step and before each phase. True saves a checkpoint and raises ``INTERRUPTED``."""
        return False


def begin(listener: Listener, what: str) -> None:
    """Report the start of a phase, unless a stop was requested.

    Raises:
        GymError: ``INTERRUPTED`` if a stop was requested.
    """
    require_wanted(listener, f"before {what}")
    listener.phase(what)


def require_wanted(listener: Listener, where: str) -> None:
    """Raise an error if the listener requests a stop."""
    if listener.should_stop():
        raise GymError(ErrorCode.INTERRUPTED, f"stopped {where}; the variants are unchanged", AGAIN)


@dataclass(frozen=True)
class CreatedVariant:
    """A variant that was added to the store.

    Attributes:
        name: Name under which the variant is served.
        owner: User id or account id of the owner.
        revision: Revision number, starting from 1.
        signed: True if the variant is signed.
        path: Path of the `.gymdelta` in the store; read-only.
        sha256: SHA-256 of the file, in hex.
        size_bytes: Size of the file in bytes.
        bits_per_weight: Bits of the file per weight of the base.
        times_smaller: Size of the base in bfloat16 divided by the size of the file.
        base_model: Name of the base.
        base_digest: Digest of the base's tensors.
        form: ``chat`` or ``plain``, the form of the training rows.
        learnt_as: Description of that form.
        judged_on: Description of the rows on which losses were measured.
        loss_before: Loss of the base, in nats per token, or per pair for preferences.
        loss_trained: Loss after training.
        loss_encoded: Loss of the base plus the file.
        kept: Fraction of the training gain that the file retains; None if training gained nothing.
        chosen_before: Loss of the chosen answers with the base, in nats per token; only for preferences.
        chosen_encoded: Loss of the chosen answers with the base plus the file; only for preferences.
        rows: Counts of the training rows; see ``RowCounts``.
        steps: Number of optimiser steps.
        best_step: Step whose weights were used, if it was selected with held-out rows.
        encoding: The codec, and the reason for it.
        note: Note in the manifest on how the variant was created.
    """

    name: str
    owner: str
    revision: int
    signed: bool
    path: Path
    sha256: str
    size_bytes: int
    bits_per_weight: float
    times_smaller: float
    base_model: str
    base_digest: str
    form: str
    learnt_as: str
    judged_on: str
    loss_before: float
    loss_trained: float
    loss_encoded: float
    kept: float | None
    chosen_before: float | None
    chosen_encoded: float | None
    steps: int
    best_step: int | None
    encoding: str
    note: str
    rows: dict[str, Any] = field(default_factory=dict)

    @property
    def helps(self) -> bool:
        """True if the variant fits the rows better than the base and makes chosen answers no less likely."""
        before, after = self.chosen_before, self.chosen_encoded
        unlikelier = before is not None and after is not None and after > before
        return self.loss_encoded < self.loss_before and not unlikelier

    def to_dict(self) -> dict[str, Any]:
        """Convert to plain data for JSON."""
        return {**asdict(self), "path": str(self.path), "helps": self.helps}


@dataclass(frozen=True)
class Losses:
    """Losses on the owner's rows in nats; None if they were not measured.

    Attributes:
        old: Loss of the old base plus the delta.
        new_base: Loss of the new base alone.
        carried: Loss of the new base plus the unscaled delta.
        scaled: Loss of the new base plus alpha times the delta; equal to ``carried`` if alpha is 1.
        refitted: Loss after the refit, as encoded.
    """

    old: float | None = None
    new_base: float | None = None
    carried: float | None = None
    scaled: float | None = None
    refitted: float | None = None

    @property
    def best(self) -> float | None:
        """The loss of the selected variant."""
        losses = [value for value in (self.scaled, self.refitted) if value is not None]
        return min(losses) if losses else None

    @property
    def helps(self) -> bool | None:
        """True if the selected variant is better than the new base alone; None if unknown."""
        if self.best is None or self.new_base is None:
            return None
        return self.best < self.new_base

    @property
    def figures(self) -> dict[str, float | None]:
        """The metrics for the store's history, which stays on this machine, unlike the public manifest."""
        return {"loss_base": self.new_base, "loss": self.best}

    @property
    def took_refit(self) -> bool:
        return self.refitted is not None and self.refitted == self.best


@dataclass(frozen=True)
class RebasedVariant:
    """A variant that was moved to a different base; see ``Losses`` and ``CreatedVariant`` for the losses.

    Attributes:
        from_base: Digest of the old base.
        onto_base: Digest of the new base.
        alpha: Scale of the carried delta.
        steps: Number of refit steps; 0 without a refit.
        measured_as: Description of the form of the rows, as in ``CreatedVariant.learnt_as``; None without rows.
    """

    name: str
    owner: str
    revision: int
    signed: bool
    path: Path
    sha256: str
    size_bytes: int
    from_base: str
    onto_base: str
    alpha: float
    steps: int
    measured_as: str | None
    judged_on: str
    losses: Losses
    note: str

    def to_dict(self) -> dict[str, Any]:
        """Convert to plain data for JSON."""
        return {
            **asdict(self),
            "path": str(self.path),
            "helps": self.losses.helps,
            "took_refit": self.losses.took_refit,
        }


def require_better(losses: Losses, refitted: bool) -> None:
    """Reject a variant that is no better than the new base alone.

    Raises:
        GymError: ``UPDATE_REFUSED`` with the losses.
    """
    if losses.helps is None:
        reason = "without rows it is unknown whether the variant still fits the new base"
        raise GymError(ErrorCode.USAGE, reason, "pass --data, or --force to move it unmeasured")
    if not losses.helps:
        raise GymError(
            ErrorCode.UPDATE_REFUSED,
            f"on these rows, the new base has loss {losses.new_base:.4f} without the variant, and {losses.best:.4f} "
            "with it",
            "pass --force to move it anyway, or remove it"
            if refitted
            else "pass --steps N to refit it on the rows, or --force to move it anyway",
        )
