"""The interface between evaluations and models: log-likelihoods of continuations, and answers."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol


@dataclass(frozen=True)
class Continuation:
    """A text to score after a context.

    Attributes:
        context_ids: Tokens of the context, at least one; tokens that exceed the model's context length are cut on the
            left and counted.
        continuation_ids: Tokens to score, at least one.
    """

    context_ids: tuple[int, ...]
    continuation_ids: tuple[int, ...]


@dataclass(frozen=True)
class Loglikelihood:
    """The result of one continuation under one model.

    Attributes:
        logprob: Sum over its tokens, in nats.
        is_greedy: True if each of its tokens is the most likely one.
        cut: Tokens of the context that were dropped because they did not fit.
    """

    logprob: float
    is_greedy: bool
    cut: int = 0


@dataclass(frozen=True)
class AnswerRequest:
    """A prompt to answer, greedily unless ``temperature`` is set.

    Attributes:
        prompt_ids: Tokens of the prompt, at least one; cut on the left like contexts.
        until: Stop texts; the answer ends before the first of them.
        temperature: Sampling temperature; 0 = greedy.
        seed: Seed of sampling, different for each prompt.
    """

    prompt_ids: tuple[int, ...]
    until: tuple[str, ...] = ()
    max_tokens: int = 256
    temperature: float = 0.0
    seed: int = 0


@dataclass(frozen=True)
class AnswerResult:
    """A model's answer to a prompt.

    Attributes:
        text: The text up to ``until`` or the end token, after the thought of a reasoning model.
        finish_reason: ``stop`` or ``length``.
        cut: Tokens of the prompt that were left out.
        margins: For every token, the lead of the chosen one over the second in nats; tokens with a small lead may
            differ on another machine.
        is_unfinished: True if the answer ended inside the thought, so that its text is empty.
    """

    text: str
    token_ids: tuple[int, ...]
    finish_reason: str
    cut: int = 0
    margins: tuple[float, ...] = field(default=(), repr=False)
    thought: str = field(default="", repr=False)
    is_unfinished: bool = False


class Scorer(Protocol):
    """Scores requests under all of its ``models``, which share a base. Close it after use.

    Attributes:
        models: Names of the models, in the order of the results' keys: ``base`` and the variants' names.
        max_length: The model's context, in tokens.
    """

    models: tuple[str, ...]
    tokenizer: Any
    max_length: int

    def loglikelihoods(
        self, continuations: Sequence[Continuation], done: Collection[int] = ()
    ) -> Iterator[tuple[int, Mapping[str, Loglikelihood]]]:
        """Score continuations; yield the index and the results by model of each continuation when it is done.

        Equal contexts are computed once for all of their continuations. Up to rounding, a result does not depend on
        the rest of the batch.

        Args:
            continuations: All continuations, including those in ``done``, so that a resumed run has the same batches.
            done: Indices that need no result; some are computed again with their batch.

        Raises:
            GymError: ``USAGE`` for an empty continuation, ``UNAVAILABLE`` for a server without log-probabilities.
        """

    def answers(self, prompts: Sequence[AnswerRequest]) -> Iterator[tuple[int, Mapping[str, AnswerResult]]]:
        """Answer prompts; yield the index and the answers by model of each prompt when it is done under all models."""

    def only(self, models: Sequence[str]) -> None:
        """Drop the other models."""

    def close(self) -> None:
        """Free the models."""
