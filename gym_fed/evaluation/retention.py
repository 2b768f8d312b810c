"""Retention check: measure whether a tuned model still knows what its base knew.

A fine-tune that fits its rows can lose other knowledge, which the loss on those rows does not show. The packaged set
has ordinary questions with their answers and short everyday texts (``assets/retention``, CC0). The log-likelihood of
each item under the tuned model is compared with that under the base, pair by pair.
"""

from __future__ import annotations

import json
import math
import random
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cache
from importlib import resources
from typing import Any

from gym_fed.base.models import NANO, load_tokenizer
from gym_fed.core.text import counted
from gym_fed.data.encoding import prompt_ids
from gym_fed.evaluation.compare import paired_difference
from gym_fed.evaluation.generation import context_of, greedy_ids
from gym_fed.evaluation.loss import OnDone, ignore_progress, row_losses
from gym_fed.serving.reasoning.answers import AnswerReader

MIN_LOSS = 0.05
"""Nats per token. A smaller rise of the loss is not reported as a loss of knowledge, even if it is significant: below
it, the answers of SmolLM2-135M-Instruct to the packaged questions stay right (docs/train.md)."""

MAX_TOKENS = 1024
_NANO_ITEMS = 120
_KNOWN_ONE_IN = 3
"""``knows_items`` scores every Nth item a second time; its question has a clear answer."""
_ANSWER_TOKENS, _ANSWERS_AT_ONCE = 24, 32
_QUESTION = "Question: {question}\nAnswer:"


@dataclass(frozen=True)
class RetentionScores:
    """A model's scores on the retention set.

    Attributes:
        losses: Loss of each item, nats per token.
        right: For each item that is a question, whether the greedy answer is right.
    """

    losses: list[float]
    right: list[bool]


@dataclass(frozen=True)
class Retention:
    """Comparison of the scores on the retention set before and after training.

    Attributes:
        num_items: Number of questions and texts.
        before: Mean loss of the base, nats per token.
        after: Mean loss of the tuned model.
        stderr: Standard error of ``after - before``, paired by item.
        num_questions: Number of questions that were answered.
        right_before: Number of questions that the base answers right.
        right_after: Number of questions that the tuned model answers right.
        answers_lost: Questions that only the base answers right.
        right_stderr: Standard error of ``right_after - right_before``, paired by question.
    """

    num_items: int
    before: float
    after: float
    stderr: float
    num_questions: int = 0
    right_before: int = 0
    right_after: int = 0
    answers_lost: int = 0
    right_stderr: float = 0.0

    @property
    def rise(self) -> float:
        """The increase of the loss; negative if it fell."""
        return self.after - self.before

    @property
    def is_lost(self) -> bool:
        """True if the loss rose, or right answers were lost, beyond twice the error.

        A rise of the loss must also exceed ``MIN_LOSS``. A fine-tune can make right answers likelier on average,
        because of their style, and still generate wrong ones, so both are measured.
        """
        fewer = self.right_before - self.right_after
        return not self.rise <= max(2 * self.stderr, MIN_LOSS) or fewer > 2 * self.right_stderr

    def describe(self) -> str:
        """Describe the figures on one line that begins with ``kept`` or ``lost``."""
        answers = (
            f"{self.right_before} -> {self.right_after} of {counted(self.num_questions, 'ordinary question')} "
            "answered right "
            f"({self.answers_lost} lost, {self.right_after - self.right_before + self.answers_lost} won), "
            if self.num_questions
            else ""
        )
        return (
            f"{'lost' if self.is_lost else 'kept'}: {answers}loss on {counted(self.num_items, 'question')} and texts "
            f"{self.before:.4f} -> {self.after:.4f} (change {self.rise:+.4f} ± {self.stderr:.4f})"
        )

    def warning(self, remedies: Sequence[str]) -> str | None:
        """Return the warning for lost knowledge, with at least two remedies; None if no knowledge is lost."""
        if not self.is_lost:
            return None
        *first, last = remedies
        return (
            f"the model has lost general knowledge: of {counted(self.num_questions, 'ordinary question')} it answers "
            f"{self.right_before} -> {self.right_after} right, and the loss on questions and texts went "
            f"{self.before:.3f} -> {self.after:.3f} nats per token; {', '.join([*first, f'or {last}'])}"
        )

    def as_dict(self) -> dict[str, Any]:
        """Convert to a JSON-compatible dictionary."""
        return {**asdict(self), "is_lost": self.is_lost}


def retention_items(tokenizer: Any) -> list[dict[str, Any]]:
    """Return the items for a tokenizer: the tasks of gym-nano for its family, else the packaged items."""
    if tokenizer.get_vocab() == load_tokenizer(NANO).get_vocab():
        from gym_fed.core.registries import TASKS
        from gym_fed.data.generated import generate_mix

        tasks = [name for name in TASKS.usable() if TASKS.new(name).group == "base"]
        items = generate_mix(tasks, _NANO_ITEMS, split="heldout")
    else:
        items = [*_packaged("questions.jsonl"), *_packaged("texts.jsonl")]
    if tokenizer.chat_template:
        return items
    return [_as_text(row) if "messages" in row else row for row in items]


def retention_scores(
    model: Any, tokenizer: Any, items: Sequence[dict[str, Any]], on_done: OnDone = ignore_progress
) -> RetentionScores:
    """Compute the loss of each item and grade the greedy answer to each question.

    ``on_done`` counts both, ``num_scores(items)`` in total.
    """
    losses = _losses(model, tokenizer, items, on_done)
    return RetentionScores(losses, _right(model, tokenizer, items, on_done))


def num_scores(items: Sequence[dict[str, Any]]) -> int:
    """Return the number of losses and answers that ``retention_scores`` computes."""
    return len(items) + sum("text" not in row for row in items)


def _losses(
    model: Any, tokenizer: Any, items: Sequence[dict[str, Any]], on_done: OnDone = ignore_progress
) -> list[float]:
    longest = min(MAX_TOKENS, context_of(model) or MAX_TOKENS)
    return row_losses(model, tokenizer, items, max_length=longest, on_done=on_done)


def _right(model: Any, tokenizer: Any, items: Sequence[dict[str, Any]], on_done: OnDone) -> list[bool]:
    """Return for each question whether the answer contains one of its keys as a word, or, without keys, is equal.

    A reasoning model answers without a thought, for which there is no room.
    """
    reader = AnswerReader(tokenizer)
    questions = [row for row in items if "text" not in row]
    prompts = [
        reader.without_thought(prompt_ids(tokenizer, row.get("prompt") or row["messages"][:-1]))
        for row in questions
    ]
    room = min(_ANSWER_TOKENS, (context_of(model) or math.inf) - max(map(len, prompts), default=0))
    if room < 1:
        return []
    right = []
    for start in range(0, len(questions), _ANSWERS_AT_ONCE):
        part = prompts[start : start + _ANSWERS_AT_ONCE]
        answers = greedy_ids(model, tokenizer, part, max_new_tokens=int(room))
        for row, prompt, answer in zip(questions[start:], part, answers, strict=False):
            right.append(_is_right(row, reader.read(prompt, answer.ids).text))
        on_done(len(answers))
    return right


def _is_right(row: dict[str, Any], answer: str) -> bool:
    if "key" in row:
        return any(re.search(rf"(?<!\w){re.escape(key)}(?!\w)", answer.casefold()) for key in row["key"])
    expected = row["completion"] if "completion" in row else row["messages"][-1]["content"]
    return bool(answer.strip() == str(expected).strip())


def knows_items(model: Any, tokenizer: Any, items: Sequence[dict[str, Any]], losses: Sequence[float]) -> bool:
    """Return True if the model prefers the items to copies with exchanged answers and shuffled words.

    For any other model (hardly trained, or trained on other languages) the retention check is meaningless, since it has
    no such knowledge to lose.

    Args:
        items: Items of ``retention_items``.
        losses: Losses of ``retention_scores``.
    """
    every = range(0, len(items), _KNOWN_ONE_IN)
    spoiled = _spoiled(items)
    wrong = _losses(model, tokenizer, [spoiled[i] for i in every])
    pairs = [(w, losses[i]) for w, i in zip(wrong, every, strict=True) if not math.isnan(w + losses[i])]
    if not pairs:
        return False
    difference = paired_difference([w for w, _ in pairs], [right for _, right in pairs])
    return difference.difference > 2 * (difference.stderr or math.inf)


def compare_retention(before: RetentionScores, after: RetentionScores) -> Retention:
    """Compare scores of the same items, base and tuned.

    Items that the base could not score are skipped. The result is not finite if the tuned model's losses are not.
    """
    pairs = [(b, a) for b, a in zip(before.losses, after.losses, strict=True) if not math.isnan(b)]
    before_losses, after_losses = [b for b, _ in pairs], [a for _, a in pairs]
    difference = paired_difference(after_losses, before_losses)
    count, right_stderr = len(before.right), 0.0
    if count:
        answers = paired_difference(list(map(float, after.right)), list(map(float, before.right)))
        right_stderr = count * (answers.stderr or 0.0)
    return Retention(
        num_items=len(pairs),
        before=sum(before_losses) / len(before_losses),
        after=sum(after_losses) / len(after_losses),
        stderr=difference.stderr or 0.0,
        num_questions=count,
        right_before=sum(before.right),
        right_after=sum(after.right),
        answers_lost=sum(b and not a for b, a in zip(before.right, after.right, strict=True)),
        right_stderr=right_stderr,
    )


@cache
def _packaged(name: str) -> tuple[dict[str, Any], ...]:
    text = (resources.files("gym_fed") / "assets" / "retention" / name).read_text(encoding="utf-8")
    return tuple(json.loads(line) for line in text.splitlines())


def _as_text(row: dict[str, Any]) -> dict[str, Any]:
    prompt, answer = (turn["content"] for turn in row["messages"])
    rest = {"key": row["key"]} if "key" in row else {}
    return {"prompt": _QUESTION.format(question=prompt), "completion": f" {answer}", **rest}


def _spoiled(items: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Replace each answer by the next item's, and shuffle the words of each text."""
    rng = random.Random(0)
    answered = [row for row in items if "text" not in row]
    following = iter([*answered[1:], *answered[:1]])
    spoiled: list[dict[str, Any]] = []
    for row in items:
        if "text" in row:
            words = row["text"].split()
            rng.shuffle(words)
            spoiled.append({"text": " ".join(words)})
            continue
        other = next(following)
        if "messages" in row:
            spoiled.append({"messages": [*row["messages"][:-1], other["messages"][-1]]})
        else:
            spoiled.append({**row, "completion": other["completion"]})
    return spoiled
