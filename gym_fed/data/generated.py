"""Draw rows of the generated text tasks, deterministic per seed, with a fixed held-out split.

Whether a prompt is held out is decided by the sha256 of its text, so no seed produces a held-out prompt for training.
"""

from __future__ import annotations

import hashlib
import random
from typing import Any, Literal

from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.core.registries import TASKS

Row = dict[str, Any]
Split = Literal["train", "heldout"]

HELDOUT_ONE_IN = 10
_MAX_DRAWS_PER_ROW = 2000
_CONVERSATION_SHARE = 0.2


def is_heldout(prompt: str) -> bool:
    """Return True if a prompt is in the held-out split (one in ten, by SHA-256)."""
    return int.from_bytes(hashlib.sha256(prompt.encode("utf-8")).digest()[:4], "big") % HELDOUT_ONE_IN == 0


def generate(name: str, num: int, *, seed: int = 0, split: Split = "train") -> list[Row]:
    """Draw ``num`` rows of a task.

    Rows are drawn with replacement: a task with few distinct prompts repeats them.

    Args:
        name: A name in ``gym_fed.core.registries.TASKS``.
        num: Number of rows.
        seed: Seed of the rows; equal seeds give equal rows on every machine.
        split: ``train`` or ``heldout``, which share no prompt for any seeds.

    Returns:
        Rows ``{"messages": [user, assistant]}``.
    """
    make = TASKS.new(name).make
    rng = random.Random(f"{name}/{seed}/{split}")
    rows: list[Row] = []
    for _ in range(num):
        for _ in range(_MAX_DRAWS_PER_ROW):
            prompt, answer = make(rng)
            if is_heldout(prompt) == (split == "heldout"):
                break
        else:
            raise GymError(
                ErrorCode.DATA_INVALID, f"task {name!r} has no {split} rows", "add prompts to the task"
            )
        rows.append(
            {"messages": [{"role": "user", "content": prompt}, {"role": "assistant", "content": answer}]}
        )
    return rows


def generate_mix(
    names: list[str], num: int, *, seed: int = 0, split: Split = "train", max_turns: int = 1
) -> list[Row]:
    """Draw ``num`` rows in total, alternating between the tasks.

    Args:
        names: Names in ``gym_fed.core.registries.TASKS``.
        num: Number of rows.
        seed: See ``generate``.
        split: See ``generate``.
        max_turns: Maximum number of questions per row. If above 1, one row in five has 2 to ``max_turns`` questions
            with random tasks; the others have one question.
    """
    share = -(-num // len(names))
    columns = [generate(name, share, seed=seed, split=split) for name in names]
    rows = [row for group in zip(*columns, strict=True) for row in group][:num]
    if max_turns > 1:
        singles = list(rows)
        rng = random.Random(f"turns/{seed}/{split}")
        for index, row in enumerate(rows):
            if rng.random() < _CONVERSATION_SHARE:
                others = [singles[rng.randrange(num)] for _ in range(rng.randint(1, max_turns - 1))]
                rows[index] = {"messages": [m for r in (row, *others) for m in r["messages"]]}
    return rows


def generate_with_rehearsal(
    names: list[str], num: int, rehearse: float, *, seed: int = 0, split: Split = "train"
) -> list[Row]:
    """Draw ``num`` rows, with evenly distributed rows of the base tasks as the share ``rehearse``.

    A model that is trained on only one new task learns to perform it for every prompt, and forgets the others. Rows of
    old tasks teach it to follow the prompt, and allow the updates of several contributors to be combined.

    Args:
        names: The new tasks.
        num: Total number of rows.
        rehearse: Share of base rows, at least 0 and below 1.
        seed: See ``generate``.
        split: See ``generate``.
    """
    old = round(num * rehearse)
    base = [name for name in TASKS.usable() if TASKS.new(name).group == "base"]
    rows = generate_mix(names, num - old, seed=seed, split=split)
    rows += generate_mix(base, old, seed=seed, split=split)
    random.Random(f"rehearse/{seed}/{split}").shuffle(rows)
    return rows
