"""Grading: a model answers the prompts of rows, or the rows contain answers, and graders score them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.evaluation.graders.base import Grader, Sample, checked_values, set_up


@dataclass(frozen=True)
class Grades:
    """The scores from graders.

    Attributes:
        means: Mean of each grader, by its name, and of their sum under ``reward``.
        values: The value of each sample, by grader.
        samples: The graded answers, in the rows' order.
        unfinished: The number of answers that ended inside a thought; they are graded as empty.
    """

    means: dict[str, float]
    values: dict[str, list[float]] = field(repr=False)
    samples: list[Sample] = field(repr=False)
    unfinished: int = 0


def grade(
    model: Any,
    tokenizer: Any,
    rows: Sequence[dict[str, Any]],
    graders: Sequence[Grader],
    *,
    max_new_tokens: int = 64,
    batch_size: int = 64,
) -> Grades:
    """Grade greedy answers to the prompts of ``rows``. The thoughts of a reasoning model are not graded.

    Args:
        model: A causal LM.
        tokenizer: The model's tokenizer, with a chat template.
        rows: Prompts (strings or messages), or conversations, whose last answer becomes the column ``answer``.
        graders: Set up here and torn down at the end.
        max_new_tokens: Longer answers are cut.
        batch_size: Prompts per generation.

    Raises:
        GymError: ``DATA_INVALID`` for no rows or rows without prompts; what the graders raise.
    """
    from gym_fed.data.rows import as_kind
    from gym_fed.data.string_rows import as_turns
    from gym_fed.evaluation.generation import generate_answers  # imports torch

    prompts = as_turns(tokenizer, as_kind(rows, "prompt"))
    for number, row in enumerate(prompts, 1):
        if isinstance(row["prompt"], str):
            raise GymError(
                ErrorCode.DATA_INVALID,
                f"row {number}: the prompt is plain text",
                'use messages: [{"role": "user", "content": ...}]',
            )
    with set_up(graders):
        conversations = [row["prompt"] for row in prompts]
        answers = generate_answers(
            model, tokenizer, conversations, max_new_tokens=max_new_tokens, batch_size=batch_size
        )
        samples = [
            Sample(prompt, answer.text, {key: row[key] for key in row if key != "prompt"}, answer.thought)
            for row, prompt, answer in zip(prompts, conversations, answers, strict=True)
        ]
        unfinished = sum(answer.is_unfinished for answer in answers)
        return replace(_graded(samples, graders), unfinished=unfinished)


def grade_answers(rows: Sequence[dict[str, Any]], graders: Sequence[Grader]) -> Grades:
    """Grade existing answers.

    Args:
        rows: ``prompt`` and ``completion``, as texts or messages, or ``messages`` that end with the assistant; with the
            columns that the graders read.
        graders: Set up here and torn down at the end.

    Raises:
        GymError: ``DATA_INVALID`` for no rows or rows without an answer; what the graders raise.
    """
    samples = [_answered(row, number) for number, row in enumerate(rows, 1)]
    with set_up(graders):
        return _graded(samples, graders)


def _answered(row: dict[str, Any], number: int) -> Sample:
    completion = row.get("completion")
    prompt = row.get("prompt")
    messages = row.get("messages") or []
    if messages and messages[-1]["role"] == "assistant":
        prompt, completion = messages[:-1], messages[-1:]
    if prompt is None or not isinstance(completion, str | list) or completion == []:
        raise GymError(
            ErrorCode.DATA_INVALID,
            f"row {number} has no answer to grade",
            "use prompt and completion, or a model that generates answers",
        )
    rest = {key: value for key, value in row.items() if key not in ("prompt", "completion", "messages")}
    return Sample(prompt, completion if isinstance(completion, str) else str(completion[-1]["content"]), rest)


def _graded(samples: list[Sample], graders: Sequence[Grader]) -> Grades:
    if not samples:
        raise GymError(ErrorCode.DATA_INVALID, "no rows to grade", "pass at least one row")
    if not graders or len({grader.name for grader in graders}) != len(graders):
        names = ", ".join(grader.name for grader in graders) or "none"
        raise GymError(ErrorCode.USAGE, f"graders: {names}", "pass at least one, each with a different name")
    values = {g.name: checked_values(g.name, g.grade(samples), len(samples)) for g in graders}
    means = {name: sum(column) / len(column) for name, column in values.items()}
    return Grades({**means, "reward": sum(means.values())}, values, samples)
