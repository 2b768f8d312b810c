"""TRL's experimental ORPO and CPO trainers on rows that were tokenised here; they may change with any release."""

from __future__ import annotations

from functools import cache
from typing import Any

from gym_fed.config.train.training import TrainingConfig
from gym_fed.data.row_counts import EncodedRows
from gym_fed.data.rows import Row
from gym_fed.training.algorithms.preference._answers import Pairs
from gym_fed.training.rows.global_batch import GlobalBatch


class WholePairs(Pairs):
    """Pairs for these trainers' collator."""

    def encode(self, config: TrainingConfig, tokenizer: Any, rows: list[Row]) -> EncodedRows:
        """Whole sequences with masks and labels."""
        pairs = super().encode(config, tokenizer, rows)
        return EncodedRows(map(_whole, pairs), pairs.counts)


def _whole(row: dict[str, Any]) -> dict[str, Any]:
    prompt = row["prompt_ids"]
    whole: dict[str, Any] = {"prompt_input_ids": prompt, "prompt_attention_mask": [1] * len(prompt)}
    for key in ("chosen", "rejected"):
        answer = row[f"{key}_ids"]
        whole[f"{key}_input_ids"] = prompt + answer
        whole[f"{key}_attention_mask"] = [1] * (len(prompt) + len(answer))
        whole[f"{key}_labels"] = [-100] * len(prompt) + answer
    return {**whole, "length": row["length"]}


class _Tokenised(GlobalBatch):
    """Mix-in, placed before one of the two: rows are as they should be, and tokens are counted as elsewhere in TRL.

    Their loss is a mean over pairs and, beside it, one over tokens: the chosen answer's next-token loss.
    """

    _seen = 0
    _nll: Any = None

    def items(self, batch: dict[str, Any]) -> dict[str, Any]:
        """Pairs, and the tokens of the next-token loss: ORPO's reads the prompt, too."""
        learned = (
            batch["chosen_labels"] != -100 if hasattr(self, "cpo_alpha") else batch["chosen_attention_mask"]
        )
        return {"pairs": len(learned), "tokens": (learned[:, 1:] == 1).sum()}

    def concatenated_forward(self, *args: Any, **named: Any) -> Any:
        """TRL's own; its next-token loss is kept, for it is weighed apart."""
        found = super().concatenated_forward(*args, **named)
        self._nll = found[4]
        return found

    def get_batch_loss_metrics(self, model: Any, batch: dict[str, Any], train_eval: str = "train") -> Any:
        """TRL's own, weighed: ``loss = nll_weight * mean over tokens + mean over pairs``."""
        loss, metrics = super().get_batch_loss_metrics(model, batch, train_eval)
        counts = self.items(batch)
        pairs, tokens = (self.share(name, counts[name]) for name in ("pairs", "tokens"))
        nll_weight = getattr(self, "cpo_alpha", 1.0)
        return loss * pairs + nll_weight * self._nll * (tokens - pairs), metrics

    @staticmethod
    def tokenize_row(row: dict[str, Any]) -> dict[str, Any]:
        return row

    def training_step(self, model: Any, inputs: dict[str, Any], *args: Any) -> Any:
        masks: Any = sum(inputs[f"{key}_attention_mask"].sum() for key in ("chosen", "rejected"))
        self._seen += int(self.accelerator.gather_for_metrics(masks.to(self.args.device)).sum())
        return super().training_step(model, inputs, *args)

    def log(self, logs: dict[str, float], *args: Any) -> None:
        super().log({**logs, "num_tokens": self._seen} if "loss" in logs else logs, *args)


@cache
def tokenised(trainer: type) -> type:
    """``trainer`` for rows of ``WholePairs``."""
    return type(trainer.__name__, (_Tokenised, trainer), {"__doc__": trainer.__doc__})
