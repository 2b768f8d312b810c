"""Extend TRL's ``SFTTrainer`` with a loss on rows to forget and a loss on rows to retain."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from trl import SFTTrainer

from gym_fed.data.encoding import IGNORED
from gym_fed.evaluation.loss import padded
from gym_fed.training.rows.global_batch import GlobalBatch

_Sft: Any = SFTTrainer  # typed as Any, since TRL's annotations are unreliable


class UnlearningTrainer(GlobalBatch, _Sft):  # type: ignore[misc]
    """Minimises ``retain_weight * L_retain + forget_loss``, each a mean over its items in the whole step.

    ``L_retain`` is in nats per token. The trainer also logs ``forget_nll`` and ``retain_nll``, the next-token losses of
    the two halves in nats per token.

    Args:
        args: Arguments of ``SFTTrainer``.
        retain_weight: Weight of ``L_retain``.
        forget_loss: Maps ``[n, t]`` log-probabilities of the rows to forget (0 for unlabelled tokens) and the mask of
            labels to a scalar loss.
        kwargs: Arguments of ``SFTTrainer``.
    """

    forget_item = "forget_tokens"
    """The items over which ``forget_loss`` is averaged: ``forget_tokens`` or ``forget_rows``."""

    def __init__(
        self, *args: Any, retain_weight: float, forget_loss: Callable[..., Tensor], **kwargs: Any
    ) -> None:
        self._forget_loss = forget_loss
        pad = kwargs["processing_class"].pad_token_id or 0
        super().__init__(*args, data_collator=ForgetAndRetain(pad), **kwargs)
        self._retain_weight = retain_weight

    def items(self, batch: dict[str, Any]) -> dict[str, Any]:
        forget, retain = _halves(batch["labels"][:, 1:] != IGNORED, batch["num_forget"])
        return {"forget_rows": len(forget), "forget_tokens": forget.sum(), "retain_tokens": retain.sum()}

    def forget_loss(self, log_probs: Tensor, labelled: Tensor, reference: Tensor | None) -> Tensor:
        """Return the loss of the rows to forget."""
        return self._forget_loss(log_probs, labelled)

    def compute_loss(
        self, model: Any, inputs: dict[str, Any], return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """Compute the loss of both halves in one forward pass."""
        counts = self.items(inputs)
        number, reference = inputs.pop("num_forget"), inputs.pop("reference", None)
        outputs = model(**inputs, use_cache=False, fused_lm_head=True)
        log_probs, labelled = outputs.log_probs.float(), outputs.label_mask
        nll = [
            -part.sum() / mask.sum().clamp(min=1)
            for part, mask in zip(_halves(log_probs, number), _halves(labelled, number), strict=True)
        ]
        forget, retain = (self.share(name, counts[name]) for name in (self.forget_item, "retain_tokens"))
        loss = self.forget_loss(log_probs[:number], labelled[:number], reference) * forget
        loss = loss + self._retain_weight * nll[1] * retain
        mode = "train" if self.model.training else "eval"
        for name, value in zip(("forget_nll", "retain_nll"), nll, strict=True):
            if self._retain_weight or name == "forget_nll":
                mean = self.accelerator.gather_for_metrics(value.detach()).mean().item()
                self._metrics[mode][name].append(mean)
        if mode == "train":
            tokens = self.accelerator.gather_for_metrics(inputs["attention_mask"].sum()).sum().item()
            self._total_train_tokens += tokens // self._tp_size
        self._metrics[mode]["num_tokens"] = [self._total_train_tokens]
        return (loss, outputs) if return_outputs else loss


class ReferenceTrainer(UnlearningTrainer):
    """A trainer whose ``forget_loss`` gets ``[n]`` log-probability ratios of answers to the untrained model."""

    train_dataset: Any
    eval_dataset: Any
    forget_item = "forget_rows"

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # No copy is needed: before the first step, and before a checkpoint is loaded, the model is the reference.
        self.train_dataset = self._with_reference(self.train_dataset)
        if self.eval_dataset is not None:
            self.eval_dataset = self._with_reference(self.eval_dataset)

    def forget_loss(self, log_probs: Tensor, labelled: Tensor, reference: Tensor | None) -> Tensor:
        assert reference is not None  # a column of both datasets
        return self._forget_loss(log_probs.sum(dim=1) - reference)

    @torch.no_grad()
    def _with_reference(self, dataset: Any) -> Any:
        """Return the dataset with a column of the reference's log-probabilities of the rows to forget."""
        was_training = self.model.training
        self.model.eval()
        log_probs: list[float] = []
        size = self.args.per_device_train_batch_size
        for start in range(0, len(dataset), size):
            rows = [{"forget": row} for row in dataset[start : start + size]["forget"]]
            batch = {key: value for key, value in self.data_collator(rows).items() if key != "num_forget"}
            batch = {key: value.to(self.model.device) for key, value in batch.items()}
            outputs = self.model(**batch, use_cache=False, fused_lm_head=True)
            log_probs += outputs.log_probs.float().sum(dim=1).tolist()
        self.model.train(was_training)
        return dataset.add_column("reference", log_probs)


class ForgetAndRetain:
    """A collator of pairs: first all rows to forget, then all rows to retain, padded on the right."""

    def __init__(self, pad_token_id: int) -> None:
        self._pad = pad_token_id

    def __call__(self, pairs: list[dict[str, Any]]) -> dict[str, Any]:
        rows = [pair[kind] for kind in ("forget", "retain") for pair in pairs if kind in pair]
        batch: dict[str, Any] = {
            "input_ids": padded([row["input_ids"] for row in rows], self._pad),
            "labels": padded([row["labels"] for row in rows], IGNORED),
            "attention_mask": padded([[1] * len(row["input_ids"]) for row in rows], 0),
            "num_forget": len(pairs),
        }
        if "reference" in pairs[0]:
            batch["reference"] = torch.tensor([pair["reference"] for pair in pairs])
        return batch


def _halves(values: Tensor, number: int) -> tuple[Tensor, Tensor]:
    return values[:number], values[number:]
