"""``example_head``: all weights of a model whose name has one of some words, and no other."""

from __future__ import annotations

from typing import Any

from gym_fed.config.schema.base import StrictModel
from gym_fed.config.train.training import TrainingConfig
from gym_fed.training.tuning.full import Full


class Words(StrictModel):
    """The section ``example_head``."""

    words: tuple[str, ...] = ("norm", "head")


class ExampleHead(Full):
    Settings = Words
    trains_all = False

    def prepare(self, model: Any, config: TrainingConfig) -> Any:
        wanted = config.example_head.words
        for name, weight in model.named_parameters():
            weight.requires_grad_(any(word in name for word in wanted))
        return model
