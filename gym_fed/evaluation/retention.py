"""Retention check: does a tuned model still know what its base knew?

A fine-tune that fits its rows can ruin everything else, and no loss on those rows shows it. The packaged set holds
ordinary questions with their answers and short everyday texts (``assets/retention``, CC0). The log-likelihood of each
item under the tuned model is compared with that under the base, pair by pair.
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cache
from importlib import resources
from typing import Any

from gym_fed.evaluation.compare import paired_difference
from gym_fed.evaluation.generation import context_of
from gym_fed.evaluation.loss import row_losses
from gym_fed.models import NANO, load_tokenizer

MIN_LOSS = 0.05
"""Nats per token. A smaller rise of the loss is not reported as a loss of knowledge, however certain it is: the
answers of SmolLM2-135M-Instruct to the packaged questions stay right below it (docs/train.md)."""

MAX_TOKENS = 1024
_NANO_ITEMS = 120
_KNOWN_ONE_IN = 3
"""``knows_items`` scores every Nth item a second time; its question has a clear answer."""
_QUESTION = "Question: {question}\nAnswer:"


@dataclass(frozen=True)
class Retention:
    """Loss on the retention set before and after training.

    Attributes:
        num_items: Number of questions and texts.
        before: Mean loss of the base, nats per token.
        after: Mean loss of the tuned model.
        stderr: Standard error of ``after - before``, paired by item.
    """

    num_items: int
    before: float
    after: float
    stderr: float

    @property
    def rise(self) -> float:
        """How much the loss rose; negative if it fell."""
        return self.after - self.before

    @property
    def is_lost(self) -> bool:
        """True if the loss rose by more than twice its error and by more than ``MIN_LOSS``."""
        return not self.rise <= max(2 * self.stderr, MIN_LOSS)

    def describe(self) -> str:
        """The figures on one line, beginning with ``kept`` or ``lost``."""
        return (
            f"{'lost' if self.is_lost else 'kept'}: loss on {self.num_items} ordinary questions and texts "
            f"{self.before:.4f} -> {self.after:.4f} (change {self.rise:+.4f} ± {self.stderr:.4f})"
        )

    def warning(self, remedies: Sequence[str]) -> str | None:
        """The warning for lost knowledge, with at least two remedies; None if it is kept."""
        if not self.is_lost:
            return None
        *first, last = remedies
        return (
            "the model has lost general knowledge: the loss on ordinary questions and texts rose, "
            f"{self.before:.3f} -> {self.after:.3f} nats per token; {', '.join([*first, f'or {last}'])}"
        )

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {**asdict(self), "is_lost": self.is_lost}


def retention_items(tokenizer: Any) -> list[dict[str, Any]]:
    """Rows of the set for a model with this tokenizer: the tasks of gym-nano for its kin, else the packaged items."""
    if tokenizer.get_vocab() == load_tokenizer(NANO).get_vocab():
        from gym_fed.data.generated import generate_mix
        from gym_fed.kinds import TASKS

        tasks = [name for name in TASKS.usable() if TASKS.new(name).group == "base"]
        items = generate_mix(tasks, _NANO_ITEMS, split="heldout")
    else:
        items = [*_packaged("questions.jsonl"), *_packaged("texts.jsonl")]
    if tokenizer.chat_template:
        return items
    return [_as_text(row["messages"]) if "messages" in row else row for row in items]


def retention_losses(model: Any, tokenizer: Any, items: Sequence[dict[str, Any]]) -> list[float]:
    """Loss of each item, nats per token."""
    return row_losses(model, tokenizer, items, max_length=min(MAX_TOKENS, context_of(model) or MAX_TOKENS))


def knows_items(model: Any, tokenizer: Any, items: Sequence[dict[str, Any]], losses: Sequence[float]) -> bool:
    """True if the model prefers the items to the same items with answers exchanged and words shuffled.

    A model that does not (one that was trained on other languages, or hardly at all) has nothing here to lose, and
    a change of its losses says nothing.

    Args:
        model: The base.
        tokenizer: Its tokenizer.
        items: Of ``retention_items``.
        losses: Of ``retention_losses``.
    """
    every = range(0, len(items), _KNOWN_ONE_IN)
    spoiled = _spoiled(items)
    wrong = retention_losses(model, tokenizer, [spoiled[i] for i in every])
    pairs = [(w, losses[i]) for w, i in zip(wrong, every, strict=True) if not math.isnan(w + losses[i])]
    if not pairs:
        return False
    found = paired_difference([w for w, _ in pairs], [right for _, right in pairs])
    return found.difference > 2 * (found.stderr or math.inf)


def compare_retention(before: Sequence[float], after: Sequence[float]) -> Retention:
    """Compare losses of the same items, base and tuned.

    Items that the base could not score are left out. The result is not finite where the tuned model's losses are not.
    """
    pairs = [(b, a) for b, a in zip(before, after, strict=True) if not math.isnan(b)]
    one, other = [b for b, _ in pairs], [a for _, a in pairs]
    found = paired_difference(other, one)
    return Retention(len(pairs), sum(one) / len(one), sum(other) / len(other), found.stderr or 0.0)


@cache
def _packaged(name: str) -> tuple[dict[str, Any], ...]:
    text = (resources.files("gym_fed") / "assets" / "retention" / name).read_text(encoding="utf-8")
    return tuple(json.loads(line) for line in text.splitlines())


def _as_text(messages: Sequence[dict[str, str]]) -> dict[str, str]:
    prompt, answer = messages[0]["content"], messages[1]["content"]
    return {"prompt": _QUESTION.format(question=prompt), "completion": f" {answer}"}


def _spoiled(items: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Each answer replaced by the next item's, and the words of each text in another order."""
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
