"""The result of a run: model, figures and paths, and what the learning check measured."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gym_fed.evaluation.retention import Retention

if TYPE_CHECKING:
    from gym_fed.data.row_counts import RowCounts
    from gym_fed.training.private.plan import Plan


@dataclass(frozen=True)
class TrainResult:
    """The result of a run.

    Attributes:
        steps: Optimiser steps of the whole run, those before a resume included.
        final_loss: Mean loss of the last ``logging_steps`` steps, in nats per token.
        losses: Loss of every step.
        history: What the algorithm logged at every step (``reward``, ``rewards/margins``, ``kl``, ``eval_loss``, ...).
        output_dir: The run folder.
        num_examples: Rows with something to learn (each counted once), however many of them the steps have seen.
        rows: What became of all that were given: learned, cut, dropped.
        num_processes: Number of processes of the run.
        num_tokens: Tokens seen, repeats included, padding not.
        model: The trained model, in evaluation mode: the one handed in, or a PEFT model around it.
        tokenizer: Its tokenizer.
        best_step: Step of its weights, under ``early_stopping.restore_best``; None for the last step.
        epsilon: Privacy cost of the run under ``privacy``, at its ``target_delta``; None without.
        privacy: The plan that was carried out.
        check: Gains and losses, if the run was checked.
    """

    steps: int
    final_loss: float
    losses: list[float]
    history: list[dict[str, float]] = field(repr=False)
    output_dir: Path
    num_examples: int
    num_tokens: int
    num_processes: int
    model: Any = field(repr=False, compare=False)
    tokenizer: Any = field(repr=False, compare=False)
    best_step: int | None = None
    epsilon: float | None = None
    privacy: Plan | None = field(default=None, repr=False)
    rows: RowCounts | None = None
    check: CheckResult | None = field(default=None, repr=False)

    def summary(self) -> dict[str, Any]:
        """Return the metrics, without losses and objects, ready for JSON."""
        keep = ("steps", "final_loss", "num_examples", "num_tokens", "num_processes")
        best = {} if self.best_step is None else {"best_step": self.best_step}
        cost = {} if self.privacy is None else {"epsilon": self.epsilon, "privacy": vars(self.privacy)}
        rows = {} if self.rows is None else {"rows": self.rows.as_dict()}
        check = {} if self.check is None else {"check": self.check.as_dict()}
        return (
            {key: getattr(self, key) for key in keep}
            | check
            | rows
            | best
            | cost
            | {"output_dir": str(self.output_dir)}
        )


@dataclass(frozen=True)
class HeldOut:
    """The loss on held-out rows: the mean over rows of each row's nats per token.

    Attributes:
        num_rows: Number of measured rows.
        before: Mean loss before training.
        after: Mean loss after training.
        stderr: Standard error of ``after - before``, paired by row; None where only means are known.
    """

    num_rows: int
    before: float
    after: float
    stderr: float | None


@dataclass(frozen=True)
class CheckResult:
    """The gains and losses of a run.

    Attributes:
        held_out: None without held-out rows.
        retention: None where the base does not know the retention set.
        prompts: The user's prompts that were answered.
        before: Their answers by the model before training.
        after: Their answers after training.
        warnings: Warnings for the user, with remedies.
        skipped: Parts that were not checked, and why.
        expected: The rows' own answers to the prompts.
    """

    held_out: HeldOut | None
    retention: Retention | None
    prompts: list[str]
    before: list[str]
    after: list[str]
    warnings: list[str]
    skipped: list[str]
    expected: list[str] = field(default_factory=list)

    def as_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        values = asdict(self)
        if self.retention is not None:
            values["retention"] = self.retention.as_dict()
        return values
