"""The YAML of `gym tune`: a training config and a ``search`` section that lists the values to try."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, model_validator

from gym_fed.config.schema.base import StrictModel
from gym_fed.config.train.training import TrainingConfig


class SearchRange(StrictModel):
    """The values that one key may take: a range of numbers, or a list."""

    low: float | None = None
    high: float | None = None
    log: bool = False
    """Draw on a logarithmic scale; for learning rates."""

    step: float | None = Field(default=None, gt=0)
    integer: bool = False
    """Whole numbers only."""

    choices: list[Any] | None = Field(default=None, min_length=1)

    @model_validator(mode="after")
    def _validate_range(self) -> SearchRange:
        if self.choices is not None:
            if self.low is not None or self.high is not None or self.log or self.step or self.integer:
                raise ValueError("give either choices or low and high")
            return self
        if self.low is None or self.high is None or self.low > self.high:
            raise ValueError("give choices, or low and high with low <= high")
        if self.log and (self.low <= 0 or self.step is not None):
            raise ValueError("log needs low above 0, and no step")
        if self.integer and any(v is not None and v != int(v) for v in (self.low, self.high, self.step)):
            raise ValueError("integer needs whole numbers")
        return self


class PrunerSettings(StrictModel):
    """When a trial that is worse than others at the same step is stopped; names are Optuna's."""

    name: Literal["median", "hyperband", "none"] = "median"
    n_startup_trials: int = Field(default=3, ge=0)
    """``median``: the first N trials run to their end."""

    n_warmup_steps: int = Field(default=0, ge=0)
    """``median``: no trial ends before this step."""

    min_resource: int = Field(default=1, ge=1)
    """``hyperband``: steps that the shortest trials get."""


class SearchSettings(StrictModel):
    """The parameters of a search, its metric and its sampler."""

    parameters: dict[str, SearchRange] = Field(min_length=1)
    """Ranges by key, named as in ``--set``: ``learning_rate``, ``lora.r``."""

    metric: str = "eval_loss"
    """A metric that a run logs; its last value counts. ``eval_*`` needs ``eval_data``."""

    direction: Literal["minimize", "maximize"] = "minimize"
    num_trials: int = Field(default=20, ge=1)
    sampler: Literal["tpe", "random"] = "tpe"
    seed: int = 0
    pruner: PrunerSettings = Field(default_factory=PrunerSettings)


class SearchConfig(TrainingConfig):
    """A training config with a search over some of its keys. ``output_dir`` is the search's folder."""

    search: SearchSettings

    @model_validator(mode="after")
    def _validate_metric(self) -> SearchConfig:
        if self.search.metric.startswith("eval_") and not (self.eval_data or self.eval_split):
            raise ValueError(f"search.metric: {self.search.metric} needs eval_data or eval_split")
        if not self.save_final:
            raise ValueError("save_final: a trial is finished when it is saved; leave it on")
        return self

    def trial(self, **changes: Any) -> dict[str, Any]:
        """Plain values of the training config alone, with top-level ``changes``."""
        return {**self.model_dump(mode="json", exclude={"search"}, exclude_unset=True), **changes}
