"""Extend TRL's preference trainers so that losses are means over the whole step (``rows.global_batch``)."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from trl import DPOTrainer, KTOTrainer, RewardTrainer
from trl.models.utils import disable_gradient_checkpointing
from trl.trainer.utils import use_adapter

from gym_fed.training.rows.global_batch import RowMeans

_Dpo: Any = DPOTrainer  # typed as Any, since TRL's annotations are unreliable
_Kto: Any = KTOTrainer
_Reward: Any = RewardTrainer


class RewardMeans(RowMeans, _Reward):  # type: ignore[misc]
    """A ``RewardTrainer`` whose loss is a mean over pairs."""


class DpoMeans(RowMeans, _Dpo):  # type: ignore[misc]
    """A ``DPOTrainer`` whose loss is a mean over pairs; its ``sft`` loss is a mean over the chosen answers' tokens.

    Some terms are still computed per batch: ``aot`` and ``aot_unpaired`` sort the pairs of a batch, and
    ``use_weighting`` multiplies ``sft`` by the mean weight of a batch.
    """

    loss_weights: list[float]

    def items(self, batch: dict[str, Any]) -> dict[str, Any]:
        return {**super().items(batch), "tokens": _chosen_tokens(batch)}

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        weights = self.loss_weights
        tokens = self.share("tokens", _chosen_tokens(inputs)) / self.share("rows", self.rows(inputs))
        self.loss_weights = [
            weight * tokens if kind == "sft" else weight
            for kind, weight in zip(self.loss_types, weights, strict=True)
        ]
        try:
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        finally:
            self.loss_weights = weights


def _chosen_tokens(batch: dict[str, Any]) -> Any:
    return batch["completion_mask"].chunk(2)[0][:, 1:].sum()


class KtoMeans(RowMeans, _Kto):  # type: ignore[misc]
    """A ``KTOTrainer`` whose loss is a mean over rows, with one estimate of the KL for all batches of a step.

    Ethayarajh et al. 2024, section 4.1, estimate the KL over a batch, and TRL over the current batches of all
    processes. This class estimates it over the whole step, before the first batch of the step and at the same cost.
    Evaluation uses TRL's estimate.
    """

    _step_kl: float | None = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._given_kl: list[float] = []  # the constructor may already compute reference log-probabilities
        arguments = kwargs["args"]
        size = arguments.per_device_train_batch_size
        # TRL refuses batches of one row, whose KL cannot be estimated from another answer. A step has several rows,
        # however.
        arguments.per_device_train_batch_size = max(size, 2)
        try:
            super().__init__(*args, **kwargs)
        finally:
            arguments.per_device_train_batch_size = size
        self._train_batch_size = arguments.train_batch_size

    def rows(self, batch: dict[str, Any]) -> int:
        return len(batch["label"])

    def count(self, batches: list[Any]) -> None:
        super().count(batches)
        if not self.calculate_KL:
            return
        self.model.train()
        total = torch.zeros((), device=self.args.device)
        for batch in map(self._prepare_inputs, batches):
            with self.compute_loss_context_manager():
                ours = self._compute_kl_logps(self.model_wrapped, batch)
            total += (ours - self._reference_kl(batch)).sum()
        assert self._step_items is not None  # counted just before
        summed = float(self.accelerator.reduce(total, reduction="sum"))
        self._step_kl = summed / max(self._step_items["rows"], 1.0)

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        if self.model.training and self._step_kl is not None:
            # TRL computes mean(policy - reference). Replace the policy's values with the mean of the step, and the
            # reference's values with 0.
            self._given_kl = [self._step_kl, 0.0]
            if "ref_KL_logps" in inputs:
                inputs = {**inputs, "ref_KL_logps": torch.zeros_like(inputs["ref_KL_logps"])}
        try:
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        finally:
            self._given_kl = []

    def _compute_kl_logps(self, model: Any, batch: dict[str, Any]) -> Any:
        if not self._given_kl:
            return super()._compute_kl_logps(model, batch)
        return torch.full((len(batch["label"]),), self._given_kl.pop(0), device=self.args.device)

    @torch.no_grad()
    def _reference_kl(self, batch: dict[str, Any]) -> Any:
        """Return the log-probabilities ``[n]`` of the neighbouring rows' answers under the reference."""
        if self.precompute_ref_logps:
            return batch["ref_KL_logps"]
        model: Any = self.ref_model
        reference: AbstractContextManager[Any] = nullcontext()
        if model is None:
            model = self.model
            unwrapped = self.accelerator.unwrap_model(model)
            reference = use_adapter(unwrapped, "ref" if "ref" in unwrapped.peft_config else None)
        checkpointing = disable_gradient_checkpointing(self.model, self.args.gradient_checkpointing_kwargs)
        with checkpointing, reference, self.compute_loss_context_manager():
            return super()._compute_kl_logps(model, batch)


class TdpoTrainer(RowMeans, _Dpo):  # type: ignore[misc]
    """The trainer for TDPO; ``answer_terms`` and ``pair_loss`` from ``tdpo.py`` are set after construction."""

    answer_terms: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], tuple[torch.Tensor, ...]]
    pair_loss: Callable[[tuple[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]], torch.Tensor]

    def _compute_loss(self, model: Any, inputs: dict[str, Any], return_outputs: bool) -> Any:
        answers = inputs["completion_mask"] == 1
        labels = inputs["input_ids"].masked_fill(~answers, -100)
        batch = {key: inputs[key] for key in ("input_ids", "attention_mask")}
        outputs = model(**batch, use_cache=False)
        with torch.no_grad():
            reference = self._reference_logits(batch)
        terms = self.answer_terms(outputs.logits.float(), reference.float(), labels)
        log_prob, log_ratio, sequential_kl = terms
        ratios, kls = log_ratio.chunk(2), sequential_kl.chunk(2)  # chosen answers, rejected answers
        loss = self.pair_loss((ratios[0], kls[0]), (ratios[1], kls[1])).mean()
        rewards = self.beta * log_ratio.detach()
        self._log_pairs(inputs, {"rewards": rewards.chunk(2), "kl": kls, "logps": log_prob.chunk(2)})
        return (loss, outputs) if return_outputs else loss

    def _reference_logits(self, batch: dict[str, Any]) -> torch.Tensor:
        model: Any = self.model if self.ref_model is None else self.ref_model
        unwrapped = self.accelerator.unwrap_model(model)
        with unwrapped.disable_adapter() if self.ref_model is None else nullcontext():
            logits: torch.Tensor = model(**batch, use_cache=False).logits
        return logits

    def _log_pairs(self, inputs: dict[str, Any], pairs: dict[str, tuple[torch.Tensor, ...]]) -> None:
        """Store metrics under TRL's names, averaged over processes; ``pairs`` contains chosen and rejected values."""
        model: Any = self.model
        metrics = self._metrics["train" if model.training else "eval"]
        gathered = {
            key: [self.accelerator.gather_for_metrics(value.detach()) for value in pair]
            for key, pair in pairs.items()
        }
        for key, (chosen, rejected) in gathered.items():
            metrics[f"{key}/chosen"].append(chosen.mean().item())
            metrics[f"{key}/rejected"].append(rejected.mean().item())
        chosen, rejected = gathered["rewards"]
        metrics["rewards/margins"].append((chosen - rejected).mean().item())
        metrics["rewards/accuracies"].append((chosen > rejected).float().mean().item())
        if model.training:
            tokens = self.accelerator.gather_for_metrics(inputs["attention_mask"].sum())
            self._total_train_tokens += int(tokens.sum())
        metrics["num_tokens"] = [self._total_train_tokens]
