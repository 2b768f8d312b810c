"""Convert a dense model to Mixture-of-Depths before training; its routers are trained and saved with it."""

from __future__ import annotations

from typing import Any

from gym_fed.config.train.training import TrainingConfig
from gym_fed.core.errors import refuse_first
from gym_fed.core.registries import TUNING
from gym_fed.training.features.base import Feature, router_conflict


class MixtureOfDepths(Feature):
    """Converts the model with ``gym_fed.base.modeling.mixture_of_depths``."""

    tried = "yes"

    def check(self, config: TrainingConfig) -> None:
        frozen = not TUNING.type_of(config.finetuning).trains_all
        compiled = "torch_compile cannot compile blocks whose number of tokens depends on the data"
        conflict = router_conflict(config)
        refuse_first(
            (frozen, f"finetuning: {config.finetuning} would not train the routers"),
            (conflict, str(conflict)),
            (config.torch_compile, compiled),
            (config.unsloth, "unsloth replaces the blocks"),
            prefix="mixture_of_depths: ",
            remedy="use finetuning: full, an algorithm such as sft or pretrain, and no compilation",
        )

    def apply(self, model: Any, config: TrainingConfig) -> None:
        from gym_fed.base.modeling.mixture_of_depths import convert_to_mixture_of_depths

        assert config.mixture_of_depths is not None  # the feature is on
        convert_to_mixture_of_depths(model, **config.mixture_of_depths.model_dump(), seed=config.seed)
