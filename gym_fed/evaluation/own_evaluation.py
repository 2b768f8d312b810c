"""Evaluate a model on the user's own rows, compare it with its base or another model, and measure its retention."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from gym_fed.base.models import load_tokenizer, quiet_loading
from gym_fed.config.train.graders import GraderConfig
from gym_fed.core.text import counted
from gym_fed.evaluation.own_set import OwnRow, Rendering, num_learned, render, rendering_of, turn_settings
from gym_fed.evaluation.retention import (
    Retention,
    RetentionScores,
    compare_retention,
    knows_items,
    num_scores,
    retention_items,
    retention_scores,
)
from gym_fed.evaluation.row_scores import (
    EXACT_MATCH,
    LOSS,
    OnProgress,
    RowMetric,
    RowScores,
    check_references,
    longest_row,
    row_metrics,
    score_rows,
)
from gym_fed.evaluation.scoring.models import ResolvedModel, dense_model

REMEDIES = (
    "mix ordinary conversations into the rows (a second data source)",
    "lower learning_rate",
    "train an adapter (finetuning: lora)",
    "train for fewer steps",
)


@dataclass(frozen=True)
class OwnResult:
    """The result of an evaluation on the user's rows.

    Attributes:
        metrics: Means, and the paired changes if there is a reference.
        after: The model's scores.
        before: Scores of the reference: the model's base, or a different model; None without a reference.
        retention: Loss on ordinary questions and texts, before and after; None if it was not measured.
        warnings: Problems with remedies.
        notes: Reasons for missing measurements and comparisons.
    """

    metrics: list[RowMetric]
    after: RowScores
    before: RowScores | None
    retention: Retention | None
    warnings: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


@dataclass
class OwnEvaluation:
    """An evaluation on the user's rows.

    Attributes:
        model: The model, with one variant at most.
        rows: Rows of ``read_own_rows``.
        reference: The model to compare with; None for none.
        reference_is_base: True if ``reference`` is the model's base, which then uses the model's rendering of rows.
        max_tokens: Maximum number of tokens of an answer; None for twice the longest reference.
        check: True to measure retention, if there is a reference.
        on_load: Called with a model's name before it is loaded.
        on_progress: See ``score_rows``.
    """

    model: ResolvedModel
    rows: Sequence[OwnRow]
    reference: ResolvedModel | None = None
    reference_is_base: bool = False
    graders: Sequence[GraderConfig] = ()
    max_tokens: int | None = None
    check: bool = True
    on_load: Callable[[str], None] = lambda name: None
    on_progress: OnProgress = lambda done, total, what: None

    def run(self) -> OwnResult:
        """Score the reference first, then the model; one of the two is in memory at a time.

        Raises:
            GymError: ``DATA_INVALID`` for rows that cannot be rendered or graded, before a model is loaded; as
                ``dense_model``, ``score_rows`` and the graders.
        """
        check_references(self.rows, self.graders)
        rendering = rendering_of(self.model.run_config)
        tokenizer = load_tokenizer(str(self.model.source))
        render(tokenizer, self.rows, rendering, 1 << 30)  # raises for rows that cannot be rendered
        notes: list[str] = []
        if learned := num_learned(self.model.run_config, self.rows):
            notes.append(
                f"{learned} of {counted(len(self.rows), 'row', 'are')} in the training data of this run: for these "
                "rows the figures measure memorisation, not ability"
            )
        if settings := turn_settings(self.model.run_config):
            notes.append(
                f"the run's dataset {' and '.join(settings)}; this evaluation's loss covers the assistant's "
                "turns with their "
                "end tokens"
            )
        retention_check = _RetentionCheck(
            self.check and self.reference is not None, tokenizer, self.on_progress
        )
        before = None
        left_out: list[str] = []
        if self.reference is not None:
            before, same_tokens = self._score_reference(tokenizer, rendering, retention_check)
            if not same_tokens:
                left_out.append(LOSS)
                notes.append("the loss per token is not compared: the models have different tokenizers")
        loaded = self._load(self.model)
        with quiet_loading():
            after = self._scores(loaded.model, tokenizer, rendering)
            retention = retention_check.result(loaded.model)
        metrics = row_metrics(after, before, leave_out=left_out)
        return OwnResult(
            metrics,
            after,
            before,
            retention,
            warnings=_warnings(metrics, retention, after),
            notes=[*notes, *retention_check.notes],
        )

    def _score_reference(
        self, tokenizer: Any, rendering: Rendering, retention_check: _RetentionCheck
    ) -> tuple[RowScores, bool]:
        assert self.reference is not None
        loaded = self._load(self.reference)
        same_tokens = loaded.tokenizer.get_vocab() == tokenizer.get_vocab()
        own = tokenizer if same_tokens and self.reference_is_base else loaded.tokenizer
        with quiet_loading():
            scores = self._scores(loaded.model, own, rendering)
            retention_check.measure_before(loaded.model, same_tokens=same_tokens)
        return scores, same_tokens

    def _load(self, model: ResolvedModel) -> Any:
        import torch

        self.on_load(model.name)
        loaded = dense_model(model)
        loaded.model.to(getattr(torch, model.request.dtype)).eval()
        return loaded

    def _scores(self, model: Any, tokenizer: Any, rendering: Rendering) -> RowScores:
        return score_rows(
            model,
            tokenizer,
            self.rows,
            rendering,
            max_length=longest_row(model, rendering),
            graders=self.graders,
            max_tokens=self.max_tokens,
            on_progress=self.on_progress,
        )


class _RetentionCheck:
    """The retention check of two models that are loaded one after the other."""

    def __init__(self, is_wanted: bool, tokenizer: Any, on_progress: OnProgress) -> None:
        self._tokenizer, self._on_progress = tokenizer, on_progress
        self._items = retention_items(tokenizer) if is_wanted else []
        self._before: RetentionScores | None = None
        self.notes: list[str] = []

    def measure_before(self, model: Any, *, same_tokens: bool) -> None:
        if not self._items:
            return
        if not same_tokens:
            self.notes.append("retention was not measured: the two models have different tokenizers")
            return
        scores = self._scores(model)
        if knows_items(model, self._tokenizer, self._items, scores.losses):
            self._before = scores
        else:
            self.notes.append(
                "retention was not measured: the base does not know the check's questions and texts"
            )

    def result(self, model: Any) -> Retention | None:
        if self._before is None:
            return None
        return compare_retention(self._before, self._scores(model))

    def _scores(self, model: Any) -> RetentionScores:
        done, total = 0, num_scores(self._items)

        def count(finished: int) -> None:
            nonlocal done
            done += finished
            self._on_progress(done, total, "retention")

        count(0)
        return retention_scores(model, self._tokenizer, self._items, count)


def _warnings(metrics: Sequence[RowMetric], retention: Retention | None, after: RowScores) -> list[str]:
    warnings = []
    for metric in metrics:
        if metric.change is None or metric.name not in (LOSS, EXACT_MATCH):
            continue
        worse = metric.change if metric.name == LOSS else -metric.change
        if not worse <= 2 * (metric.change_stderr or math.inf):
            warnings.append(
                f"the model is worse on these rows, {metric.name} {metric.before:.3f} -> {metric.value:.3f}: train on "
                "rows like these, for fewer epochs (num_train_epochs), or lower learning_rate"
            )
    if retention is not None and (lost := retention.warning(REMEDIES)) is not None:
        warnings.append(lost)
    if after.unfinished:
        warnings.append(
            f"{counted(after.unfinished, 'answer')} ended inside a thought and counted as empty: raise --max-tokens"
        )
    cut = sum(ended is False for ended in after.ended)
    if cut > sum(ended is True for ended in after.ended):
        warnings.append(
            f"{cut} of {counted(cut + sum(ended is True for ended in after.ended), 'answer')} did not end within "
            f"{counted(after.max_tokens, 'token')}: raise --max-tokens, or train the model longer"
        )
    return warnings
