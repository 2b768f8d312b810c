"""TRL's experimental ORPO and CPO trainers on rows that were tokenised here; they may change with any release."""

from __future__ import annotations

from functools import cache
from typing import Any

from gym_fed.config.training import TrainingConfig
from gym_fed.data.row_counts import EncodedRows
from gym_fed.data.rows import Row
from gym_fed.training.algorithms._preference import Pairs


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


class _Tokenised:
    """Mix-in, placed before one of the two: rows are as they should be, and tokens are counted as elsewhere in TRL."""

    _seen = 0

    @staticmethod
    def tokenize_row(row: dict[str, Any]) -> dict[str, Any]:
        return row

    def training_step(self, model: Any, inputs: dict[str, Any], *args: Any) -> Any:
        trainer: Any = self
        parent: Any = super()
        masks: Any = sum(inputs[f"{key}_attention_mask"].sum() for key in ("chosen", "rejected"))
        self._seen += int(trainer.accelerator.gather_for_metrics(masks.to(trainer.args.device)).sum())
        return parent.training_step(model, inputs, *args)

    def log(self, logs: dict[str, float], *args: Any) -> None:
        parent: Any = super()
        parent.log({**logs, "num_tokens": self._seen} if "loss" in logs else logs, *args)


@cache
def tokenised(trainer: type) -> type:
    """``trainer`` for rows of ``WholePairs``."""
    return type(trainer.__name__, (_Tokenised, trainer), {"__doc__": trainer.__doc__})
