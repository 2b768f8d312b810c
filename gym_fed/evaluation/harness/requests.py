"""Requests as tokens, and how their prompts are made."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass

from gym_fed.evaluation.scoring.scorer import AnswerRequest, AnswerResult, Continuation, Loglikelihood


@dataclass(frozen=True)
class PromptOptions:
    """How prompts are made.

    Attributes:
        num_fewshot: Examples of every prompt; None: as each task says. A task that is defined with 0 keeps 0.
        limit: Only the first so many rows of each task.
        apply_chat_template: Prompts are conversations in the template of the model, examples are turns of them. None:
            of those tasks that say so, where the model has a template.
        rows: Given a task and how many rows it has: the numbers of those to use; None for all. Their prompts are those
            that they have among all.
    """

    num_fewshot: int | None = None
    limit: int | None = None
    apply_chat_template: bool | None = False
    rows: Callable[[str, int], Collection[int]] | None = None


RequestKey = tuple[str, int, int, int]
"""Task, row, number of the request in the row, repetition."""


@dataclass(frozen=True)
class PreparedRequest:
    """One request of a row, as tokens.

    Attributes:
        key: Of the request.
        continuations: To be scored and summed; more than one only for a text longer than the context.
        answer: To be answered, in place of ``continuations``.
    """

    key: RequestKey
    continuations: tuple[Continuation, ...] = ()
    answer: AnswerRequest | None = None


Outcome = Loglikelihood | AnswerResult
