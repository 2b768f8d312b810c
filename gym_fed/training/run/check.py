"""Checks what a run has gained and lost: held-out rows, the user's own prompts, and ordinary knowledge.

The figures of the model before its first step are kept in the run folder (``check.json``), so that a run that was
stopped is compared with where it began.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from gym_fed.config.train.training import TrainingConfig
from gym_fed.data.encoding import prompt_ids
from gym_fed.evaluation.compare import paired_difference
from gym_fed.evaluation.generation import greedy_ids
from gym_fed.evaluation.loss import row_losses
from gym_fed.evaluation.retention import (
    Retention,
    compare_retention,
    knows_items,
    retention_items,
    retention_losses,
)
from gym_fed.files import write_atomically
from gym_fed.kinds import ALGORITHMS
from gym_fed.modeling.processors import is_processor
from gym_fed.models import quiet_loading
from gym_fed.training.algorithms.base import Algorithm
from gym_fed.training.rows.run_kind import rows_to_encode
from gym_fed.waiting import waiting

FILE = "check.json"
_PROMPTS = 3
_LEAST_ANSWER_TOKENS, _MOST_ANSWER_TOKENS = 32, 192
_MAX_HELD_OUT = 200
_MANY_TRUNCATED = 0.5
_NO_SPREAD = 1e-6


@dataclass(frozen=True)
class Measurement:
    """A model at one moment.

    Attributes:
        held_out: Loss of each held-out row, nats per token; empty where there are none, or the loss is not one of rows.
        retention: Loss of each retention item; empty where the base does not know them.
        answers: Greedy answers to the user's prompts.
        ended: For each answer, whether it ended by itself.
    """

    held_out: list[float] = field(default_factory=list)
    retention: list[float] = field(default_factory=list)
    answers: list[str] = field(default_factory=list)
    ended: list[bool] = field(default_factory=list)


@dataclass(frozen=True)
class HeldOut:
    """Loss on held-out rows, nats per token.

    Attributes:
        num_rows: How many rows were measured.
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
    """What a run has gained and lost.

    Attributes:
        held_out: None without held-out rows.
        retention: None where the base does not know the retention set.
        prompts: The user's prompts that were answered.
        before: Their answers by the model before training.
        after: Their answers after training.
        warnings: What the user should know, with remedies.
        skipped: What was not checked, and why.
    """

    held_out: HeldOut | None
    retention: Retention | None
    prompts: list[str]
    before: list[str]
    after: list[str]
    warnings: list[str]
    skipped: list[str]

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        values = asdict(self)
        if self.retention is not None:
            values["retention"] = self.retention.as_dict()
        return values


class LearningCheck:
    """Measures a model before and after its run.

    Args:
        config: The run's config, its defaults chosen.
        algorithm: Of the run.
        tokenizer: Of the model.
        data: Rows that are learned, as the algorithm takes them.
        eval_data: Held-out rows; None without any.
        folder: The run folder.
    """

    def __init__(
        self,
        config: TrainingConfig,
        algorithm: Algorithm,
        tokenizer: Any,
        data: Sequence[dict[str, Any]],
        eval_data: Sequence[dict[str, Any]] | None,
        folder: Path,
    ) -> None:
        self._config, self._algorithm, self._tokenizer, self._folder = config, algorithm, tokenizer, folder
        self._before = Measurement()
        self.skipped: list[str] = []
        self._why_not = self._reason_to_skip()
        is_of_rows = algorithm.row_kind == "supervised"
        self._held_out = list(eval_data or ())[:_MAX_HELD_OUT] if is_of_rows else []
        asked = [row for row in (*(eval_data or ()), *data) if (prompt_of(row) is not None)]
        self._prompts = [prompt_of(row) for row in asked[:_PROMPTS]]
        self._num_tokens = self._answer_tokens(asked[:_PROMPTS])
        self._items: list[dict[str, Any]] = []

    def measure_before(self, model: Any, *, is_new: bool) -> None:
        """Measure the model before its first step; a run that is resumed reads what was measured then."""
        if self._why_not is not None:
            self.skipped.append(self._why_not)
            return
        file = self._folder / FILE
        if self._config.model_init is None:
            self._items = retention_items(self._tokenizer)
        if not is_new and (stored := _read(file)) is not None:
            self._before = stored
        else:
            losses = retention_losses(model, self._tokenizer, self._items) if self._items else []
            if losses and not knows_items(model, self._tokenizer, self._items, losses):
                losses = []
            self._before = self._measured(model, losses)
            write_atomically(file, f"{json.dumps(asdict(self._before))}\n".encode())
        if not self._before.retention:
            self._items = []
            self.skipped.append(
                "what the model kept: it does not know the ordinary questions and texts of the check"
            )

    def result(self, model: Any, history: Sequence[dict[str, float]]) -> CheckResult:
        """Measure the trained model and compare.

        Args:
            model: After its run.
            history: What the trainer logged.
        """
        warnings = learning_warnings(self._config, history)
        if self._why_not is not None:
            return CheckResult(_from_history(history), None, [], [], [], warnings, self.skipped)
        before = self._before
        with quiet_loading(), waiting("measuring the trained model"):
            retained = retention_losses(model, self._tokenizer, self._items) if self._items else []
            after = self._measured(model, retained)
        held_out = _compared(before.held_out, after.held_out) or _from_history(history)
        retention = compare_retention(before.retention, after.retention) if after.retention else None
        warnings += _outcome_warnings(held_out, retention, after, self._num_tokens, self._config)
        prompts = [_shown(prompt) for prompt in self._prompts]
        return CheckResult(
            held_out, retention, prompts, before.answers, after.answers, warnings, self.skipped
        )

    def _measured(self, model: Any, retention: list[float]) -> Measurement:
        held_out = (
            row_losses(
                model, self._tokenizer, self._held_out, max_length=self._config.max_length, batch_size=4
            )
            if self._held_out
            else []
        )
        answers, ended = self._answers(model)
        return Measurement(held_out, retention, answers, ended)

    def _answers(self, model: Any) -> tuple[list[str], list[bool]]:
        if not self._prompts:
            return [], []
        ids = [prompt_ids(self._tokenizer, prompt) for prompt in self._prompts if prompt is not None]
        found = greedy_ids(model, self._tokenizer, ids, max_new_tokens=self._num_tokens)
        texts = [str(self._tokenizer.decode(answer.ids, skip_special_tokens=True)) for answer in found]
        return texts, [answer.ended for answer in found]

    def _answer_tokens(self, rows: Sequence[dict[str, Any]]) -> int:
        """Room for an answer: twice the longest of the rows' own, so that one that goes on has not stopped."""
        own = max(
            (len(self._tokenizer(text)["input_ids"]) for text in map(_answer_of, rows) if text), default=0
        )
        return min(_MOST_ANSWER_TOKENS, max(_LEAST_ANSWER_TOKENS, 2 * own))

    def _reason_to_skip(self) -> str | None:
        config = self._config
        if is_processor(self._tokenizer):
            self._tokenizer = self._tokenizer.tokenizer
            return "answers and what the model kept: a model that reads images is not checked"
        if config.distributed is not None and config.distributed.strategy != "ddp":
            return f"answers and what the model kept: no process of {config.distributed.strategy} has the whole model"
        if ALGORITHMS.type_of(config.algorithm).task_type != "CAUSAL_LM":
            return "answers and what the model kept: a reward model writes no text"
        return None


def begin_check(
    config: TrainingConfig,
    algorithm: Algorithm,
    model: Any,
    tokenizer: Any,
    given: tuple[list[dict[str, Any]], list[dict[str, Any]] | None],
    folder: Path,
    *,
    is_new: bool,
) -> LearningCheck:
    """Measure the model before its first step; ``given`` are training and held-out rows, see ``LearningCheck``."""
    data, eval_data = (None if rows is None else rows_to_encode(config, tokenizer, rows) for rows in given)
    check = LearningCheck(config, algorithm, tokenizer, data or [], eval_data, folder)
    with quiet_loading(), waiting("measuring the model before its first step"):
        check.measure_before(model, is_new=is_new)
    return check


def prompt_of(row: dict[str, Any]) -> str | list[dict[str, Any]] | None:
    """The prompt of a row, up to the last answer; None for texts, encoded rows, and rows with tools or pictures."""
    if row.get("tools") or row.get("images"):
        return None
    if "messages" in row:
        messages = list(row["messages"])
        if len(messages) > 1 and messages[-1].get("role") == "assistant":
            return messages[:-1]
        return None
    prompt = row.get("prompt")
    return prompt if isinstance(prompt, str | list) and prompt else None


def learning_warnings(config: TrainingConfig, history: Sequence[dict[str, float]]) -> list[str]:
    """Signs in the log that a run of rewards could not learn.

    Args:
        config: Of the run.
        history: What the trainer logged at each step: of GRPO and its kin ``completions/clipped_ratio`` and
            ``reward_std``.
    """
    found = []
    clipped = [
        entry["completions/clipped_ratio"] for entry in history if "completions/clipped_ratio" in entry
    ]
    spread = [entry["reward_std"] for entry in history if "reward_std" in entry]
    section = config.chosen_sections().get(config.algorithm)
    limit = getattr(section, "max_completion_length", None)
    if clipped and limit is not None and (share := sum(clipped) / len(clipped)) > _MANY_TRUNCATED:
        found.append(
            f"{share:.0%} of the answers were cut at {config.algorithm}.max_completion_length = {limit}, so their "
            f"rewards say little; raise it, or ask for shorter answers"
        )
    if spread and (flat := sum(value <= _NO_SPREAD for value in spread)) > _MANY_TRUNCATED * len(spread):
        found.append(
            f"in {flat} of {len(spread)} steps all answers to a prompt got the same reward, from which nothing is "
            f"learned; look at the graders with gym grade, raise {config.algorithm}.num_generations or temperature, "
            "or take prompts that the model sometimes gets right"
        )
    return found


def _outcome_warnings(
    held_out: HeldOut | None,
    retention: Retention | None,
    after: Measurement,
    num_tokens: int,
    config: TrainingConfig,
) -> list[str]:
    found = []
    if held_out is not None and held_out.after - held_out.before > 2 * (held_out.stderr or 0.0):
        found.append(
            f"the loss on held-out rows rose, {held_out.before:.3f} -> {held_out.after:.3f}: the run learned its rows "
            "by heart; train for fewer epochs (num_train_epochs), or on more rows"
        )
    if retention is not None:
        remedies = ["mix ordinary conversations into the rows (a second data source)", "lower learning_rate"]
        if not config.chosen_sections().get("lora"):
            remedies.append("train an adapter (finetuning: lora)")
        remedies.append("train shorter")
        lost = retention.warning(remedies)
        found += [] if lost is None else [lost]
    if after.ended and not any(after.ended):
        found.append(
            f"none of {len(after.ended)} answers ended within {num_tokens} tokens: the model may not stop; train "
            "longer, and look at how rows end (chat_template)"
        )
    return found


def _compared(before: Sequence[float], after: Sequence[float]) -> HeldOut | None:
    pairs = [(b, a) for b, a in zip(before, after, strict=True) if not math.isnan(b)]
    if not pairs:
        return None
    one, other = [b for b, _ in pairs], [a for _, a in pairs]
    found = paired_difference(other, one)
    return HeldOut(len(pairs), sum(one) / len(one), sum(other) / len(other), found.stderr)


def _from_history(history: Sequence[dict[str, float]]) -> HeldOut | None:
    """The algorithm's own loss on held-out rows at its first and last evaluation."""
    found = [entry["eval_loss"] for entry in history if "eval_loss" in entry]
    return HeldOut(0, found[0], found[-1], None) if len(found) > 1 else None


def _read(file: Path) -> Measurement | None:
    try:
        return Measurement(**json.loads(file.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return None


def _answer_of(row: dict[str, Any]) -> str:
    for key in ("completion", "answer", "chosen"):
        value = row.get(key)
        if isinstance(value, str):
            return value
        if isinstance(value, list) and value:
            return str(value[-1].get("content") or "")
    messages = row.get("messages")
    return str(messages[-1].get("content") or "") if messages else ""


def _shown(prompt: str | list[dict[str, Any]] | None) -> str:
    if isinstance(prompt, list):
        return str(prompt[-1].get("content") or "")
    return prompt or ""
