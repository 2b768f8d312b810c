"""Converts a dense model to Mixture-of-Depths before training; the routers are trained and saved with it."""

from __future__ import annotations

from typing import Any

from gym_fed.config.train.training import TrainingConfig
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.core.registries import ALGORITHMS, TUNING
from gym_fed.training.features._passes import reference_mode, writes_answers
from gym_fed.training.features.base import Feature


class MixtureOfDepths(Feature):
    """Own code; see ``gym_fed.base.modeling.mixture_of_depths``."""

    tried = "yes"

    def check(self, config: TrainingConfig) -> None:
        problem = None
        if not TUNING.type_of(config.finetuning).trains_all:
            problem = f"finetuning: {config.finetuning} would not train the routers"
        elif (found := _of_the_algorithm(config)) is not None:
            problem = found
        elif config.torch_compile:
            problem = "torch_compile cannot compile blocks whose number of tokens follows from the data"
        elif config.unsloth:
            problem = "unsloth has blocks of its own"
        if problem is not None:
            raise GymError(
                ErrorCode.CONFIG_INVALID,
                f"mixture_of_depths: {problem}",
                "use finetuning: full, an algorithm such as sft or pretrain, and no compilation",
            )

    def apply(self, model: Any, config: TrainingConfig) -> None:
        from gym_fed.base.modeling.mixture_of_depths import convert_to_mixture_of_depths

        assert config.mixture_of_depths is not None  # the feature is on
        convert_to_mixture_of_depths(model, **config.mixture_of_depths.model_dump(), seed=config.seed)


def check_routed(model: Any, config: TrainingConfig) -> None:
    """Refuse what routers do not go with for a model that has had them before this run, too.

    Raises:
        GymError: ``CONFIG_INVALID``.
    """
    if getattr(model.config, "mixture_of_depths", None) is None:
        return
    problem = _of_the_algorithm(config)
    if problem is not None:
        raise GymError(
            ErrorCode.CONFIG_INVALID, f"model: is a mixture of depths, and {problem}", "take a dense model"
        )


def _of_the_algorithm(config: TrainingConfig) -> str | None:
    if ALGORITHMS.type_of(config.algorithm).task_type != "CAUSAL_LM" or writes_answers(config):
        return f"{config.algorithm} needs a model that all blocks and a cache belong to"
    if reference_mode(config) is not None:
        return (
            f"the reference of {config.algorithm} would send other tokens through the blocks than the policy"
        )
    return None
