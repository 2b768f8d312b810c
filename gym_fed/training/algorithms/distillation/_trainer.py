"""Extend TRL's ``GKDTrainer`` with tokenised rows, and with the temperature in the divergence.

TRL 1.16 uses ``temperature`` only for sampling. It divides the loss of an on-policy batch by the number of tokens of
the answers that the student's answers replaced. Here, the student answers all batches of a step before training on the
first one, so that the tokens of the step can be counted.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from trl.experimental.gkd import GKDTrainer
from trl.models.utils import unwrap_model_for_generation

from gym_fed.data.encoding import IGNORED
from gym_fed.evaluation.loss import padded
from gym_fed.training.rows.global_batch import GlobalBatch

_Gkd: Any = GKDTrainer  # typed as Any, since TRL's annotations are unreliable


class _Unanswered(_Gkd):  # type: ignore[misc]
    """A subclass of TRL's trainer whose training step generates no answers."""

    def training_step(self, model: Any, inputs: dict[str, Any], num_items_in_batch: Any = None) -> Any:
        return super(_Gkd, self).training_step(model, inputs, num_items_in_batch)


class DistillationTrainer(GlobalBatch, _Unanswered):
    """A trainer whose loss is the divergence from the teacher, in nats per labelled token of the optimiser step.

    Args:
        args: Arguments of ``GKDTrainer``.
        divergence: Maps ``[n, vocabulary]`` logits of student and teacher to their divergence, summed over ``n``.
        tokens: Columns of both models' logits that correspond to tokens; the other columns are padding.
        kwargs: Arguments of ``GKDTrainer``.
    """

    def __init__(
        self,
        *args: Any,
        divergence: Callable[[Tensor, Tensor], Tensor],
        tokens: slice | list[int],
        **kwargs: Any,
    ) -> None:
        self._divergence = divergence
        self._tokens = tokens
        tokenizer = kwargs["processing_class"]
        super().__init__(*args, data_collator=PromptedRows(tokenizer.pad_token_id or 0), **kwargs)
        columns = range(self.model.config.get_text_config().vocab_size)
        padding = sorted({*columns} - {*(columns[tokens] if isinstance(tokens, slice) else tokens)})
        if padding:  # the teacher may have no embeddings for them
            self.generation_config.suppress_tokens = padding

    def items(self, batch: dict[str, Any]) -> dict[str, Any]:
        return {"tokens": (batch["labels"][:, 1:] != IGNORED).sum()}

    def count(self, batches: list[Any]) -> None:
        """Replace the answers in a fraction ``lmbda`` of the batches with the student's own, then count tokens."""
        for batch in batches:
            if random.random() <= self.lmbda:
                self._answer(batch)
        super().count(batches)

    def _answer(self, batch: dict[str, Any]) -> None:
        prepared = self._prepare_inputs(batch)
        with unwrap_model_for_generation(
            self.model_wrapped,
            self.accelerator,
            generation_kwargs=self.generation_kwargs,
            gradient_checkpointing_kwargs=self.args.gradient_checkpointing_kwargs,
        ) as model:
            generated = self.generate_on_policy_outputs(model, prepared, self.generation_config)
        batch["input_ids"], batch["attention_mask"], batch["labels"] = generated

    def compute_loss(
        self, model: Any, inputs: dict[str, Any], return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """Return the mean divergence over labelled tokens."""
        given = {key: inputs[key] for key in ("input_ids", "attention_mask")}
        outputs = model(**given, use_cache=False)
        self.teacher_model.eval()
        with torch.no_grad():
            teacher_logits = self.teacher_model(**given, use_cache=False).logits
        labelled = inputs["labels"][:, 1:] != IGNORED
        student, teacher = (
            logits[:, :-1][labelled][:, self._tokens] for logits in (outputs.logits, teacher_logits)
        )
        total = self._divergence(student, teacher)
        number = labelled.sum()
        loss = total / number.clamp(min=1) * self.share("tokens", number)
        if self.model.training:
            tokens = self.accelerator.gather_for_metrics(inputs["attention_mask"].sum()).sum().item()
            self._total_train_tokens += tokens // self._tp_size
            self._metrics["train"]["num_tokens"] = [self._total_train_tokens]
        return (loss, outputs) if return_outputs else loss


class PromptedRows:
    """A collator that pads ``input_ids`` and ``labels`` on the right, and the last answers' prompts on the left."""

    def __init__(self, pad_token_id: int) -> None:
        self._pad = pad_token_id

    def __call__(self, rows: list[dict[str, Any]]) -> dict[str, Tensor]:
        prompts = [row["input_ids"][: row["prompt_length"]] for row in rows]
        return {
            "input_ids": padded([row["input_ids"] for row in rows], self._pad),
            "labels": padded([row["labels"] for row in rows], IGNORED),
            "attention_mask": padded([[1] * len(row["input_ids"]) for row in rows], 0),
            "prompts": padded(prompts, self._pad, left=True),
            "prompt_attention_mask": padded([[1] * len(prompt) for prompt in prompts], 0, left=True),
        }
