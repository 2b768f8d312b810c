"""Compare a model before and after a run, on held-out rows, the user's prompts, and general knowledge.

The measurements before the first step are stored in the run folder (``check.json``), so that a resumed run is compared
with its start.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from gym_fed.base.modeling.processors import is_processor
from gym_fed.base.models import quiet_loading
from gym_fed.config.train.training import TrainingConfig
from gym_fed.core.errors import GymError
from gym_fed.core.files import write_atomically
from gym_fed.core.progress import Activity, spinner
from gym_fed.core.registries import ALGORITHMS
from gym_fed.core.text import counted
from gym_fed.data.encoding import prompt_ids
from gym_fed.data.rows import MEDIA
from gym_fed.evaluation.compare import paired_difference
from gym_fed.evaluation.generation import context_of, greedy_ids
from gym_fed.evaluation.loss import row_losses
from gym_fed.evaluation.retention import (
    Retention,
    RetentionScores,
    compare_retention,
    knows_items,
    num_scores,
    retention_items,
    retention_scores,
)
from gym_fed.training.algorithms.base import Algorithm
from gym_fed.training.rows.encode_part import rows_to_encode
from gym_fed.training.run.result import CheckResult, HeldOut
from gym_fed.training.run.reward_warnings import reward_warnings

FILE = "check.json"
_MAX_PROMPTS = 3
_MIN_ANSWER_TOKENS, _MAX_ANSWER_TOKENS = 32, 192
_MAX_HELD_OUT = 200
_SKIP_HINT = "--no-check skips it"
_STOPPED = "stopped by a signal"
_SEARCHED_ROWS = 32
"""Maximum number of training rows, and of held-out rows, that are searched for prompts."""


def prompt_of(row: dict[str, Any]) -> str | list[dict[str, Any]] | None:
    """Return a row's prompt without its last answer; None for texts, encoded rows, and rows with tools or media."""
    if any(row.get(key) for key in ("tools", *MEDIA)):
        return None
    if "messages" in row:
        messages = list(row["messages"])
        if len(messages) > 1 and messages[-1].get("role") == "assistant":
            return messages[:-1]
        return None
    prompt = row.get("prompt")
    return prompt if isinstance(prompt, str | list) and prompt else None


def answer_of(row: dict[str, Any]) -> str:
    """Return the row's answer to its prompt; empty if it has none."""
    for key in ("completion", "answer", "chosen"):
        value = row.get(key)
        if isinstance(value, str):
            return value
        if isinstance(value, list) and value:
            last = value[-1]
            return str(last.get("content") or "") if isinstance(last, dict) else str(last)
    messages = row.get("messages")
    return str(messages[-1].get("content") or "") if messages else ""


def prompt_text(prompt: str | list[dict[str, Any]] | None) -> str:
    """Return the text to print for a prompt: its last message."""
    if isinstance(prompt, list):
        return str(prompt[-1].get("content") or "")
    return prompt or ""


@dataclass(frozen=True)
class Measurement:
    """A model's losses and answers before or after its run.

    Attributes:
        held_out: Loss of each held-out row, as mean nats per token; empty without held-out rows or if the loss is not
            per row.
        retention: Loss of each retention item; empty if the base does not know the items.
        right: True for each question of the retention set that was answered correctly.
        answers: Greedy answers to the user's prompts.
        ended: True for each answer that ended with an end token.
    """

    held_out: list[float] = field(default_factory=list)
    retention: list[float] = field(default_factory=list)
    right: list[bool] = field(default_factory=list)
    answers: list[str] = field(default_factory=list)
    ended: list[bool] = field(default_factory=list)

    @property
    def scores(self) -> RetentionScores:
        """The model's scores on the retention set."""
        return RetentionScores(self.retention, self.right)

    @property
    def shown_answers(self) -> list[str]:
        """The answers for people: with an ellipsis where the maximum length cut them."""
        pairs = zip(self.answers, self.ended, strict=True)
        return [answer if ended else f"{answer.rstrip()} …" for answer, ended in pairs]


class LearningCheck:
    """Measures a model before and after its run.

    Args:
        config: The run's config, with defaults applied.
        algorithm: The run's algorithm.
        tokenizer: The model's tokenizer.
        rows: Rows whose prompts may be displayed, held-out rows first.
        encoded: Encoded held-out rows; None if there are none.
        folder: The run folder.
        should_stop: Called between the parts of the second measurement and after each token of its answers; True
            skips the rest.
    """

    def __init__(
        self,
        config: TrainingConfig,
        algorithm: Algorithm,
        tokenizer: Any,
        rows: Sequence[dict[str, Any]],
        encoded: Sequence[dict[str, Any]] | None,
        folder: Path,
        should_stop: Callable[[], bool] | None = None,
    ) -> None:
        self._should_stop, self._has_trained = should_stop, False
        self._config, self._algorithm, self._tokenizer, self._folder = config, algorithm, tokenizer, folder
        self._before = Measurement()
        self.skipped: list[str] = []
        self._skip_reason = self._reason_to_skip()
        self._held_out = _labelled_rows(encoded or ()) if measures_rows(config) else []
        self._prompted_rows = [row for row in rows if prompt_of(row) is not None]
        self._prompts: list[list[int]] = []
        self._num_tokens, self._must_end = _MIN_ANSWER_TOKENS, False
        self._items: list[dict[str, Any]] = []

    def measure_before(self, model: Any, activity: Activity, *, is_new: bool) -> None:
        """Measure the model before its first step. A resumed run reads the stored measurement instead."""
        if self._skip_reason is not None:
            self.skipped.append(self._skip_reason)
            return
        self._choose_prompts(context_of(model))
        file = self._folder / FILE
        if self._config.model_init is None:
            self._items = retention_items(self._tokenizer)
        if not is_new and (stored := _read(file)) is not None:
            self._before = stored
        else:
            activity.report(0, self._num_parts())
            scores = self._scores(model, activity)
            if scores.losses and not knows_items(model, self._tokenizer, self._items, scores.losses):
                scores = RetentionScores([], [])
            self._before = self._measure(model, scores, activity)
            write_atomically(file, f"{json.dumps(asdict(self._before))}\n".encode())
        if not self._before.retention:
            self._items = []
            self.skipped.append("general knowledge: the base does not know the check's questions and texts")

    def result(
        self, model: Any, history: Sequence[dict[str, float]], best_step: int | None = None
    ) -> CheckResult:
        """Measure the trained model and compare it with the base. A failure is reported instead of raised.

        Args:
            model: The trained model.
            history: The trainer's log.
            best_step: The step whose weights were restored; None for the last step.
        """
        self._has_trained = True
        warnings = reward_warnings(self._config, history)
        logged = _logged_losses(history, best_step)
        if self._skip_reason is not None:
            return CheckResult(logged, None, [], [], [], warnings, self.skipped)
        try:
            with quiet_loading(), spinner("measuring the trained model", _SKIP_HINT) as activity:
                activity.report(0, self._num_parts())
                after = self._measure(model, self._scores(model, activity), activity)
        except (RuntimeError, MemoryError, IndexError, ValueError, KeyboardInterrupt, GymError) as error:
            unnamed = _STOPPED if isinstance(error, KeyboardInterrupt) else type(error).__name__
            first = (str(error).strip().splitlines() or [unnamed])[0]
            self.skipped.append(f"the trained model: {first}")
            return CheckResult(logged, None, [], [], [], warnings, self.skipped)
        before = self._before
        held_out = _compare(before.held_out, after.held_out) or logged
        retention = compare_retention(before.scores, after.scores) if after.retention else None
        warnings += self._outcome_warnings(held_out, retention, after)
        return CheckResult(
            held_out,
            retention,
            prompts=[prompt_text(prompt_of(row)) for row in self._prompted_rows],
            before=before.shown_answers,
            after=after.shown_answers,
            warnings=warnings,
            skipped=self.skipped,
            expected=[answer_of(row) for row in self._prompted_rows],
        )

    def _num_parts(self) -> int:
        """Return the number of losses and answered questions of one measurement; then the prompts are answered."""
        return num_scores(self._items) + len(self._held_out)

    def _scores(self, model: Any, activity: Activity) -> RetentionScores:
        if not self._items:
            return RetentionScores([], [])
        return retention_scores(model, self._tokenizer, self._items, activity.add)

    def _measure(self, model: Any, scores: RetentionScores, activity: Activity) -> Measurement:
        self._raise_if_stopped()
        held_out = []
        if self._held_out:
            options: dict[str, Any] = {"max_length": self._config.max_length, "on_done": activity.add}
            held_out = row_losses(model, self._tokenizer, self._held_out, **options)
        self._raise_if_stopped()
        answers, ended = self._answers(model, activity)
        return Measurement(held_out, scores.losses, scores.right, answers, ended)

    def _raise_if_stopped(self) -> None:
        """Abort the second measurement if a stop was requested. Before training, a signal ends the process instead."""
        if self._has_trained and self._should_stop is not None and self._should_stop():
            raise KeyboardInterrupt(_STOPPED)

    def _choose_prompts(self, context: int | None) -> None:
        """Choose the first prompts that leave room for an answer; set its maximum length from the reference answers."""
        chosen = []
        for row in self._prompted_rows:
            ids = prompt_ids(self._tokenizer, prompt_of(row) or "")
            if context is None or len(ids) + _MIN_ANSWER_TOKENS <= context:
                chosen.append((row, ids))
            if len(chosen) == _MAX_PROMPTS:
                break
        self._prompted_rows, self._prompts = [row for row, _ in chosen], [ids for _, ids in chosen]
        references = [self._tokenizer(answer_of(row))["input_ids"] for row in self._prompted_rows]
        longest = max(map(len, references), default=0)
        room = math.inf if context is None else context - max(map(len, self._prompts), default=0)
        self._num_tokens = int(min(_MAX_ANSWER_TOKENS, max(_MIN_ANSWER_TOKENS, 2 * longest), room))
        self._must_end = self._num_tokens > longest

    def _answers(self, model: Any, activity: Activity) -> tuple[list[str], list[bool]]:
        if not self._prompts:
            return [], []
        name = f"answering {counted(len(self._prompts), 'prompt')} of yours, tokens"
        activity.report(0, self._num_tokens, name)

        def on_token(num_tokens: int) -> None:
            self._raise_if_stopped()
            activity.report(num_tokens, self._num_tokens)

        options: dict[str, Any] = {"max_new_tokens": self._num_tokens, "on_token": on_token}
        answers = greedy_ids(model, self._tokenizer, self._prompts, **options)
        activity.report(self._num_tokens, self._num_tokens)
        texts = [str(self._tokenizer.decode(answer.ids, skip_special_tokens=True)) for answer in answers]
        return texts, [answer.ended for answer in answers]

    def _outcome_warnings(
        self, held_out: HeldOut | None, retention: Retention | None, after: Measurement
    ) -> list[str]:
        warnings = []
        rise = 0.0 if held_out is None else held_out.after - held_out.before
        error = math.inf if held_out is None or held_out.stderr is None else held_out.stderr
        if held_out is not None and rise > 2 * error and not self._algorithm.forgets:
            warnings.append(
                f"the loss on held-out rows rose, {held_out.before:.3f} -> {held_out.after:.3f}: the run has "
                "memorised its rows, or learning_rate is too high; train for fewer epochs (num_train_epochs), "
                "lower the rate, or add rows"
            )
        if retention is not None:
            remedies = [
                "mix ordinary conversations into the rows (a second data source)",
                "lower learning_rate",
            ]
            if not self._config.chosen_sections().get("lora"):
                remedies.append("train an adapter (finetuning: lora)")
            if (forgotten := retention.warning([*remedies, "train for fewer steps"])) is not None:
                warnings.append(forgotten)
        if self._must_end and after.ended and not any(after.ended):
            also = "" if any(self._before.ended) else ", nor did any before the run"
            warnings.append(
                f"none of {counted(len(after.ended), 'answer')} ended within {counted(self._num_tokens, 'token')}"
                f"{also}: the model may not stop; check the answers, and how rows end (chat_template)"
            )
        return warnings

    def _reason_to_skip(self) -> str | None:
        config = self._config
        if is_processor(self._tokenizer):
            return "answers and general knowledge: a model that reads images or audio is not checked"
        if config.splits_state:
            return f"answers and general knowledge: with {config.distributed_strategy}, no process has the whole model"
        if ALGORITHMS.type_of(config.algorithm).task_type != "CAUSAL_LM":
            return "answers and general knowledge: a reward model generates no text"
        return None


def begin_check(
    config: TrainingConfig,
    algorithm: Algorithm,
    model: Any,
    tokenizer: Any,
    given: tuple[Sequence[dict[str, Any]], Sequence[dict[str, Any]] | None],
    encoded: Sequence[dict[str, Any]] | None,
    folder: Path,
    *,
    is_new: bool,
    should_stop: Callable[[], bool] | None,
) -> LearningCheck:
    """Measure the model before its first step. See ``LearningCheck`` for arguments that are not listed here.

    Args:
        model: The model, prepared for training.
        given: Training rows, and held-out rows or None.
        is_new: False if the run is resumed.
    """
    data, eval_data = given
    rows = rows_to_encode(config, tokenizer, [*(eval_data or ())[:_SEARCHED_ROWS], *data[:_SEARCHED_ROWS]])
    check = LearningCheck(config, algorithm, tokenizer, rows, encoded, folder, should_stop)
    with quiet_loading(), spinner("measuring the model before its first step", _SKIP_HINT) as activity:
        check.measure_before(model, activity, is_new=is_new)
    return check


def measures_rows(config: TrainingConfig) -> bool:
    """Return True if held-out rows are measured with the model's own loss, False for the algorithm's evaluation."""
    return ALGORITHMS.type_of(config.algorithm).row_kind == "supervised" and config.packing != "bfd"


def evaluates_first(config: TrainingConfig) -> bool:
    """Return True if a checked run evaluates its held-out rows before the first step with the algorithm's loss."""
    return (
        not measures_rows(config)
        and not ALGORITHMS.type_of(config.algorithm).generates
        and config.eval_strategy != "no"
        and config.early_stopping is None  # it might restore the untrained weights as the best
    )


def _labelled_rows(encoded: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    rows = itertools.islice((row for row in encoded if "input_ids" in row and "labels" in row), _MAX_HELD_OUT)
    return [{"input_ids": row["input_ids"], "labels": row["labels"]} for row in rows]


def _compare(before: Sequence[float], after: Sequence[float]) -> HeldOut | None:
    pairs = [(b, a) for b, a in zip(before, after, strict=True) if not math.isnan(b)]
    if not pairs:
        return None
    before, after = [b for b, _ in pairs], [a for _, a in pairs]
    difference = paired_difference(after, before)
    return HeldOut(len(pairs), sum(before) / len(before), sum(after) / len(after), difference.stderr)


def _logged_losses(history: Sequence[dict[str, float]], best_step: int | None) -> HeldOut | None:
    """Return the algorithm's held-out loss before the first step and with the final weights, if both were logged."""
    losses = {int(entry["step"]): entry["eval_loss"] for entry in history if "eval_loss" in entry}
    after = losses.get(max(losses, default=0) if best_step is None else best_step)
    if 0 not in losses or len(losses) == 1 or after is None:
        return None
    return HeldOut(0, losses[0], after, None)


def _read(file: Path) -> Measurement | None:
    try:
        return Measurement(**json.loads(file.read_text(encoding="utf-8")))
    except (OSError, ValueError, RecursionError, TypeError):
        return None
