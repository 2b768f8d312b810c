"""What another author's package would hold: an algorithm, a tuning method, an optimiser and a feature."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from pydantic import Field

from gym_fed.config.schema.base import StrictModel
from gym_fed.config.train.training import TrainingConfig
from gym_fed.training.algorithms.sft import Sft
from gym_fed.training.features.base import Feature
from gym_fed.training.optimizers.base import OptimizerChoice
from gym_fed.training.tuning.full import Full

SEEN: list[str] = []


class Weighing(StrictModel):
    """The section ``weighed_sft``."""

    beta: float = Field(default=1.0, gt=0)
    keep: bool = True


class WeighedSft(Sft):
    """``sft`` whose loss is ``beta`` times as large."""

    Settings = Weighing

    def build(self, job: Any) -> Any:
        trainer, beta = super().build(job), getattr(job.config, job.config.algorithm).beta
        plain = trainer.compute_loss

        def weighed(*args: Any, **named: Any) -> Any:
            found = plain(*args, **named)
            return (beta * found[0], *found[1:]) if isinstance(found, tuple) else beta * found

        trainer.compute_loss = weighed
        return trainer


class Norms(StrictModel):
    """The section ``norms``."""

    also: list[str] = Field(default_factory=list)


class NormsOnly(Full):
    """Trains the norms' scales, and what ``also`` names."""

    Settings = Norms
    trains_all = False

    def prepare(self, model: Any, config: TrainingConfig) -> Any:
        wanted = ("norm", *getattr(config, config.finetuning).also)
        for name, weight in model.named_parameters():
            weight.requires_grad_(any(word in name for word in wanted))
        return model


class SignSgd(OptimizerChoice):
    """Steps of one size, by the gradient's sign."""

    def make(self, model: Any, config: TrainingConfig) -> Any:
        import torch

        class Signs(torch.optim.SGD):
            def step(self, closure: Any = None) -> Any:
                for group in self.param_groups:
                    for weight in group["params"]:
                        if weight.grad is not None:
                            weight.grad.sign_()
                return super().step(closure)

        weights = [weight for weight in model.parameters() if weight.requires_grad]
        return Signs(weights, lr=config.learning_rate)


class Watching(StrictModel):
    """The key ``watch``."""

    word: str


class Watch(Feature):
    """Says its word while the run lasts."""

    Settings = Watching

    @contextmanager
    def during(self, model: Any, config: TrainingConfig) -> Iterator[None]:
        SEEN.append(config.watch.word)
        yield


class Loud(Feature):
    """A feature that is on or off."""

    def check(self, config: TrainingConfig) -> None:
        SEEN.append("loud")


class NeedsReports(Sft):
    """Needs more than a contributor's rows."""

    federates = False
