"""The base model of a variant, with or without a delta, and how well models fit the user's rows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import logsigmoid

from gym_fed.base.models import load_model, model_name
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.data.chat_templates.choice import NONE, use_chat_template
from gym_fed.data.rows import Row, as_kind
from gym_fed.delta.base import BaseSpec, model_tensors
from gym_fed.delta.file import DeltaFile, apply_delta
from gym_fed.evaluation.loss import heldout_loss
from gym_fed.personalization.recipe import BaseSize
from gym_fed.personalization.rows import PersonalKind, PersonalRows
from gym_fed.training.rows.answers import cut_answers, encode_answers

BETA = 0.1
"""Beta of the preference loss that is reported; DPO's default."""


@dataclass(frozen=True)
class Base:
    """A loaded base model.

    Attributes:
        source: Name or path from which the base was loaded.
        model: A causal LM in float32, which is changed only inside ``plus``.
        spec: Spec against which deltas are checked.
    """

    source: str
    model: Any
    tokenizer: Any
    spec: BaseSpec

    @classmethod
    def load(cls, source: str, device: str = "auto") -> Base:
        """Load a base that is on this machine.

        Raises:
            GymError: ``MODEL_INVALID`` for an adapter; other errors of ``load_model``.
        """
        loaded = load_model(source, device=device)
        if hasattr(loaded.model, "peft_config"):
            reason = f"{source} is an adapter, but variants need a full model"
            remedy = "use its base model, or merge it: Trainer.export(format='huggingface')"
            raise GymError(ErrorCode.MODEL_INVALID, reason, remedy)
        return cls(source, loaded.model, loaded.tokenizer, BaseSpec.of(loaded.model, model_name(source)))

    @property
    def context(self) -> int | None:
        """The context length in tokens; None if the config has none."""
        length = getattr(self.model.config, "max_position_embeddings", None)
        return int(length) if length else None

    @property
    def size(self) -> BaseSize:
        """The properties of the base on which the defaults of a variant depend."""
        return BaseSize(self.context, self.spec.num_parameters)

    @contextmanager
    def plus(self, delta: DeltaFile, scale: float = 1.0) -> Iterator[Any]:
        """Add ``scale * delta`` to the base within a context; the exact base is restored afterwards."""
        tensors = model_tensors(self.model)
        originals = {name: tensors[name].clone() for name in delta.names if name in tensors}
        try:
            apply_delta(self.model, delta, scale)
            yield self.model
        finally:
            with torch.no_grad():
                for name, tensor in originals.items():
                    tensors[name].copy_(tensor)

    def for_rows(self, rows: PersonalRows) -> Base:
        """Return the base with the tokenizer that trains and evaluates these rows."""
        return replace(self, tokenizer=use_chat_template(self.tokenizer, NONE)) if rows.raw else self

    def opened(self, path: Path) -> DeltaFile:
        """Open and check a delta of this base, which the caller must close.

        Raises:
            GymError: Errors from ``DeltaFile.open``.
        """
        return DeltaFile.open(path, self.spec)


class LossEvaluator:
    """Computes losses in nats for models of one architecture, always on the same rows.

    Examples use ``heldout_loss``, per token. Preferences use DPO's loss per pair (Rafailov et al. 2023, equation 7,
    with beta 0.1) relative to a fixed reference. A model with the same preferences as the reference has a loss of log
    2.

    Args:
        rows: At least one row.
        reference: Reference model for preferences; it is scored once on creation and not stored.
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
        """Return the loss of a model, which may be inf or NaN for a broken model."""
        if self._kind == "supervised":
            with _of_judged_rows():
                return heldout_loss(model, self._tokenizer, self._rows, max_length=self._max_length)
        gained = self._margins(model) - self._reference
        return float(-logsigmoid(BETA * gained).mean())

    def chosen_loss(self, model: Any) -> float | None:
        """Return the loss of the chosen answers in nats per token; None for examples.

        The preference loss also decreases if both answers become unlikely, so that the model produces neither of them.
        """
        if self._kind == "supervised":
            return None
        chosen = as_kind(self._rows, "supervised")
        return heldout_loss(model, self._tokenizer, chosen, max_length=self._max_length)

    @torch.inference_mode()
    def _margins(self, model: Any) -> torch.Tensor:
        """Return the log-probabilities of chosen minus rejected answers, ``[pairs]`` float32."""
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


@contextmanager
def _of_judged_rows() -> Iterator[None]:
    """Add to errors that the row numbers are those of held-out rows."""
    try:
        yield
    except GymError as error:
        raise GymError(error.code, f"held-out rows of the variant: {error.message}", error.hint) from error


def _log_prob(model: Any, pair: dict[str, Any], answer: str, device: torch.device) -> float:
    """Return the log-probability in nats of an answer, given its prompt."""
    prompt, words = pair["prompt_ids"], pair[f"{answer}_ids"]
    ids = torch.tensor([prompt + words], device=device)
    logits = model(input_ids=ids, use_cache=False).logits[0, :-1].float()
    tokens = logits.log_softmax(-1).gather(-1, ids[0, 1:, None])[:, 0]
    return float(tokens[max(0, len(prompt) - 1) :].sum())
