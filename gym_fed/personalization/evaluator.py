"""Evaluate how well a model fits a user's rows: loss of answers, or loss of preferences."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.nn.functional import logsigmoid

from gym_fed.core.errors import GymError
from gym_fed.data.rows import Row, as_kind
from gym_fed.evaluation.loss import heldout_loss
from gym_fed.personalization.rows import PersonalKind
from gym_fed.training.algorithms.preference._answers import cut_answers, encode_answers

BETA = 0.1
"""Beta of the reported preference loss; DPO's default."""


@contextmanager
def _of_judged_rows() -> Iterator[None]:
    """Explain in errors that row numbers count held-out rows."""
    try:
        yield
    except GymError as error:
        raise GymError(
            error.code, f"rows that the variant is judged by: {error.message}", error.hint
        ) from error


class LossEvaluator:
    """Computes losses in nats for models of one architecture on the same rows.

    Examples use ``heldout_loss``, per token. Preferences use DPO's loss per pair (Rafailov et al. 2023, equation 7,
    with beta 0.1) against a fixed reference; a model with the reference's preferences has a loss of log 2.

    Args:
        kind: Kind of the rows.
        rows: At least one row.
        tokenizer: Tokenizer of the base.
        reference: Reference model for preferences; it is scored on creation and not stored.
        max_length: Maximum number of tokens per row.
    """

    def __init__(
        self, kind: PersonalKind, rows: Sequence[Row], tokenizer: Any, reference: Any, max_length: int
    ) -> None:
        self._kind = kind
        self._rows = rows
        self._tokenizer = tokenizer
        self._max_length = max_length
        self._pairs: list[dict[str, Any]] = []
        if kind == "preference":
            with _of_judged_rows():
                encoded = encode_answers(tokenizer, rows, ("chosen", "rejected"))
                self._pairs = cut_answers(encoded, max_length)
            self._reference = self._margins(reference)

    def loss(self, model: Any) -> float:
        """Return the loss of a model; may be inf or NaN for a broken one."""
        if self._kind == "supervised":
            with _of_judged_rows():
                return heldout_loss(model, self._tokenizer, self._rows, max_length=self._max_length)
        gained = self._margins(model) - self._reference
        return float(-logsigmoid(BETA * gained).mean())

    def chosen_loss(self, model: Any) -> float | None:
        """Return the loss of the chosen answers in nats per token; None for examples.

        The preference loss also decreases if both answers become unlikely, so that the model produces neither.
        """
        if self._kind == "supervised":
            return None
        chosen = as_kind(self._rows, "supervised")
        return heldout_loss(model, self._tokenizer, chosen, max_length=self._max_length)

    @torch.inference_mode()
    def _margins(self, model: Any) -> torch.Tensor:
        """Return log-probabilities of chosen minus rejected answers, ``[pairs]`` float32."""
        device = next(model.parameters()).device
        was_training = model.training
        model.eval()
        try:
            return torch.tensor(
                [
                    _log_prob(model, p, "chosen", device) - _log_prob(model, p, "rejected", device)
                    for p in self._pairs
                ]
            )
        finally:
            model.train(was_training)


def _log_prob(model: Any, pair: dict[str, Any], answer: str, device: torch.device) -> float:
    """Return the log-probability of an answer given its prompt, in nats."""
    prompt, words = pair["prompt_ids"], pair[f"{answer}_ids"]
    ids = torch.tensor([prompt + words], device=device)
    logits = model(input_ids=ids, use_cache=False).logits[0, :-1].float()
    tokens = logits.log_softmax(-1).gather(-1, ids[0, 1:, None])[:, 0]
    return float(tokens[max(0, len(prompt) - 1) :].sum())
