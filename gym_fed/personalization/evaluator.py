"""Evaluate how well a model fits a user's rows: the loss of the answers, or of preferences."""

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
    """Add to an error that its row numbers count held-out rows."""
    try:
        yield
    except GymError as error:
        raise GymError(
            error.code, f"rows that the variant is judged by: {error.message}", error.hint
        ) from error


class LossEvaluator:
    """Losses in nats of models of one architecture on the same rows.

    Examples: per token, ``heldout_loss``. Preferences: per pair, DPO's loss (Rafailov et al. 2023, equation 7, with
    beta 0.1) against a fixed reference; a model that prefers nothing beyond it has log 2.

    Args:
        kind: Kind of the rows.
        rows: At least one.
        tokenizer: The base's tokenizer.
        reference: For preferences; scored now, and not kept.
        max_length: Tokens a row.
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
        """The loss of a model; may be inf or NaN for a broken one."""
        if self._kind == "supervised":
            with _of_judged_rows():
                return heldout_loss(model, self._tokenizer, self._rows, max_length=self._max_length)
        gained = self._margins(model) - self._reference
        return float(-logsigmoid(BETA * gained).mean())

    def chosen_loss(self, model: Any) -> float | None:
        """The loss of the chosen answers in nats per token; None for examples.

        The preference loss also falls where both answers become unlikely, and then the model gives neither.
        """
        if self._kind == "supervised":
            return None
        chosen = as_kind(self._rows, "supervised")
        return heldout_loss(model, self._tokenizer, chosen, max_length=self._max_length)

    @torch.inference_mode()
    def _margins(self, model: Any) -> torch.Tensor:
        """Log-probability of the chosen minus the rejected answer, ``[pairs]`` float32."""
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
    """Log-probability of an answer given its prompt, in nats."""
    prompt, words = pair["prompt_ids"], pair[f"{answer}_ids"]
    ids = torch.tensor([prompt + words], device=device)
    logits = model(input_ids=ids, use_cache=False).logits[0, :-1].float()
    tokens = logits.log_softmax(-1).gather(-1, ids[0, 1:, None])[:, 0]
    return float(tokens[max(0, len(prompt) - 1) :].sum())
