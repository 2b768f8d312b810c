"""Converts a dense model to Mixture-of-Depths before training; the routers are trained and saved with it."""

from __future__ import annotations

from typing import Any

from gym_fed.config.train.training import TrainingConfig
from gym_fed.core.errors import refuse_first
from gym_fed.core.registries import ALGORITHMS, TUNING
from gym_fed.training.features.base import Feature, reference_mode, writes_answers


class MixtureOfDepths(Feature):
    """Converts the model by ``gym_fed.base.modeling.mixture_of_depths``."""

    tried = "yes"

    def check(self, config: TrainingConfig) -> None:
        frozen = not TUNING.type_of(config.finetuning).trains_all
        compiled = "torch_compile cannot compile blocks whose number of tokens follows from the data"
        conflict = _conflict_of_algorithm(config)
        refuse_first(
            (frozen, f"finetuning: {config.finetuning} would not train the routers"),
            (conflict, str(conflict)),
            (config.torch_compile, compiled),
            (config.unsloth, "unsloth has its own blocks"),
            prefix="mixture_of_depths: ",
            remedy="use finetuning: full, an algorithm such as sft or pretrain, and no compilation",
        )

    def apply(self, model: Any, config: TrainingConfig) -> None:
        from gym_fed.base.modeling.mixture_of_depths import convert_to_mixture_of_depths

        assert config.mixture_of_depths is not None  # the feature is on
        convert_to_mixture_of_depths(model, **config.mixture_of_depths.model_dump(), seed=config.seed)


def check_routed(model: Any, config: TrainingConfig) -> None:
    """Refuse settings that conflict with routers, for a model that had routers before this run."""
    if getattr(model.config, "mixture_of_depths", None) is None:
        return
    conflict = _conflict_of_algorithm(config)
    refuse_first((conflict, f"model: is a mixture of depths, and {conflict}", "take a dense model"))


def _conflict_of_algorithm(config: TrainingConfig) -> str | None:
    if ALGORITHMS.type_of(config.algorithm).task_type != "CAUSAL_LM" or writes_answers(config):
        return f"{config.algorithm} needs a model that all blocks and a cache belong to"
    if reference_mode(config) is not None:
        return (
            f"the reference of {config.algorithm} would send other tokens through the blocks than the policy"
        )
    return None
