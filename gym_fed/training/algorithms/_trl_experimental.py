"""TRL's experimental ORPO and CPO trainers on rows that were tokenised here; they may change with any release."""

from __future__ import annotations

from functools import cache
from typing import Any

from gym_fed.config.training import TrainingConfig
from gym_fed.data.rows import Row
from gym_fed.training.algorithms._preference import cut_answers, encode_answers


def encode_for_experimental(config: TrainingConfig, tokenizer: Any, rows: list[Row]) -> list[dict[str, Any]]:
    """Whole sequences with masks and labels, as these trainers' collator wants them; see ``cut_answers``."""
    encoded = []
    for row in cut_answers(encode_answers(tokenizer, rows, ("chosen", "rejected")), config.max_length):
        prompt = row["prompt_ids"]
        one: dict[str, Any] = {"prompt_input_ids": prompt, "prompt_attention_mask": [1] * len(prompt)}
        for key in ("chosen", "rejected"):
            answer = row[f"{key}_ids"]
            one[f"{key}_input_ids"] = prompt + answer
            one[f"{key}_attention_mask"] = [1] * (len(prompt) + len(answer))
            one[f"{key}_labels"] = [-100] * len(prompt) + answer
        encoded.append({**one, "length": row["length"]})
    return encoded


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
    """``trainer`` for rows of ``encode_for_experimental``."""
    return type(trainer.__name__, (_Tokenised, trainer), {"__doc__": trainer.__doc__})
