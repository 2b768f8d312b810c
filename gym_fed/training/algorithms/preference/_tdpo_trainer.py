"""TRL's ``DPOTrainer`` with the loss of ``tdpo.py``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from trl import DPOTrainer

from gym_fed.training.rows.global_batch import RowMeans

_Dpo: Any = DPOTrainer  # its annotations are not relied on


class TdpoTrainer(RowMeans, _Dpo):  # type: ignore[misc]
    """The trainer of TDPO; ``answer_terms`` and ``pair_loss`` of ``tdpo.py`` are set after construction."""

    answer_terms: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], tuple[torch.Tensor, ...]]
    pair_loss: Callable[[tuple[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]], torch.Tensor]

    def _compute_loss(self, model: Any, inputs: dict[str, Any], return_outputs: bool) -> Any:
        answers = inputs["completion_mask"] == 1
        labels = inputs["input_ids"].masked_fill(~answers, -100)
        batch = {key: inputs[key] for key in ("input_ids", "attention_mask")}
        outputs = model(**batch, use_cache=False)
        with torch.no_grad():
            reference = self._reference_logits(batch)
        log_prob, log_ratio, sequential_kl = self.answer_terms(
            outputs.logits.float(), reference.float(), labels
        )
        ratios, kls = log_ratio.chunk(2), sequential_kl.chunk(2)  # chosen answers, rejected answers
        loss = self.pair_loss((ratios[0], kls[0]), (ratios[1], kls[1])).mean()
        rewards = self.beta * log_ratio.detach()
        self._note(
            inputs,
            {"rewards": rewards.chunk(2), "kl": kls, "logps": log_prob.chunk(2)},
        )
        return (loss, outputs) if return_outputs else loss

    def _reference_logits(self, batch: dict[str, Any]) -> torch.Tensor:
        if self.ref_model is not None:
            logits: torch.Tensor = self.ref_model(**batch, use_cache=False).logits
            return logits
        model: Any = self.model
        with self.accelerator.unwrap_model(model).disable_adapter():
            logits = model(**batch, use_cache=False).logits
        return logits

    def _note(self, inputs: dict[str, Any], pairs: dict[str, tuple[torch.Tensor, ...]]) -> None:
        """Store metrics under TRL's names, averaged over processes; ``pairs`` are chosen and rejected ``[n]`` each."""
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
