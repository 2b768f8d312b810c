"""Compare a version with version 0 by held-out loss and by retention of the base's knowledge."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from pydantic import ConfigDict

from gym_fed.base.models import quiet_loading
from gym_fed.config.hub.task import SoupReference
from gym_fed.config.schema.base import StrictModel
from gym_fed.core.text import counted
from gym_fed.evaluation.loss import OnDone, ignore_progress
from gym_fed.evaluation.retention import (
    Retention,
    compare_retention,
    knows_items,
    num_scores,
    retention_items,
    retention_scores,
)
from gym_fed.evaluation.row_scores import LOSS, RowMetric, paired_metric
from gym_server.rounds.hub_model import HubModel

_REMEDIES = (
    "lower recipe.learning_rate",
    "train adapters (recipe.finetuning: lora)",
    "let contributors mix ordinary conversations into their rows",
    "continue from an earlier version (gym-server rollback)",
)


class VersionChange(StrictModel):
    """The effect of the rounds up to a version."""

    model_config = ConfigDict(allow_inf_nan=True, ser_json_inf_nan="constants")

    height: int
    digest: str
    held_out: RowMetric | None
    """Loss on ``gate.heldout`` at version 0 and at this version; None if there are no held-out rows."""
    retention: Retention | None
    """Loss on general questions and texts; None if the base performs too poorly on them to measure retention."""
    notes: list[str]
    """Skipped measurements, with the reasons."""

    @property
    def lines(self) -> list[str]:
        """Return the figures as text lines."""
        found = []
        if (held := self.held_out) is not None:
            error = "" if held.change_stderr is None else f" ± {held.change_stderr:.4f}"
            found.append(
                f"version 0 -> {self.height}, {counted(held.num_rows, 'held-out row')}: loss {held.before:.4f} -> "
                f"{held.value:.4f} (change {held.change:+.4f}{error})"
            )
        if self.retention is not None:
            found.append(self.retention.describe())
        return [*found, *self.notes]

    @property
    def warnings(self) -> list[str]:
        """Return warnings for the coordinator, with hints."""
        found = []
        held = self.held_out
        if held is not None and not (held.change or 0.0) <= 2 * (held.change_stderr or math.inf):
            found.append(
                f"version {self.height} is worse than version 0 on the held-out rows, loss {held.before:.3f} -> "
                f"{held.value:.3f}: check what was merged (gym-server rounds), lower recipe.learning_rate, or "
                "continue from an earlier version (gym-server rollback)"
            )
        if self.retention is not None and (lost := self.retention.warning(_REMEDIES)) is not None:
            found.append(lost)
        return found


def measure_change(
    model: HubModel,
    soups: Sequence[SoupReference],
    height: int,
    *,
    on_begin: Callable[[int], object] = ignore_progress,
    on_done: OnDone = ignore_progress,
) -> VersionChange:
    """Measure version 0 and the version that results from the soups.

    Args:
        model: The hub's model, at any version; it is left at the measured version.
        soups: Soups from the base to the version.
        height: Height of the version.
        on_begin: Called with the total number of losses and answers to compute.
        on_done: Called with the number of losses and answers just computed.

    Raises:
        GymError: See ``HubModel.follow``.
    """
    notes = []
    with quiet_loading():
        model.follow([])
        items = retention_items(model.tokenizer)
        on_begin(2 * (model.num_held_out + num_scores(items)))
        rows_before = model.row_losses(on_done) if model.has_gate else []
        scores = retention_scores(model.model, model.tokenizer, items, on_done)
        before = scores if knows_items(model.model, model.tokenizer, items, scores.losses) else None
        if before is None:
            notes.append(
                "retained knowledge not checked: the base performs too poorly on the check's questions and texts"
            )
        model.follow(soups)
        held_out = None
        counted_rows = [i for i, loss in enumerate(rows_before) if not math.isnan(loss)]
        if counted_rows:
            rows_after = model.row_losses(on_done)
            held_out = paired_metric(
                LOSS, [rows_after[i] for i in counted_rows], [rows_before[i] for i in counted_rows]
            )
        else:
            notes.append("held-out loss not checked: there are no held-out rows (gate.heldout)")
        retention = (
            None
            if before is None
            else compare_retention(before, retention_scores(model.model, model.tokenizer, items, on_done))
        )
    return VersionChange(
        height=height, digest=model.digest, held_out=held_out, retention=retention, notes=notes
    )
