"""Define the base class of features, and apply the features that a config enables.

A feature is a key of the config that changes how the model is computed, not what it learns from.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, ClassVar, Literal

from pydantic import BaseModel

from gym_fed.config.train.training import TrainingConfig
from gym_fed.core.errors import refuse_first
from gym_fed.core.registries import ALGORITHMS, FEATURES, TUNING

_OFF = (None, False, "no", "auto")

log = logging.getLogger("gym_fed")


class Feature:
    """A feature. Instances are stateless; methods are called only if the key is set."""

    Settings: ClassVar[type[BaseModel] | None] = None
    """Schema of the key; None for a boolean key. Built-in features leave this None, since their keys are typed in the
    config (``gym_fed/config/train/compute.py``)."""

    per_example: ClassVar[bool] = False
    """True if the tests cover the feature together with per-example gradients (``privacy``)."""

    tried: ClassVar[str] = ""
    """Combinations that the tests run, on a CPU and with tiny models; `gym docs members` shows them."""

    def check(self, config: TrainingConfig) -> None:
        """Refuse a config that this feature, machine or installation does not support, before anything is loaded.

        Raises:
            GymError: ``CONFIG_INVALID`` or ``MISSING_DEPENDENCY``, with the key and the remedy.
        """

    def arguments(self, config: TrainingConfig) -> dict[str, Any]:
        """Return keyword arguments for ``transformers.TrainingArguments``."""
        return {}

    def apply(self, model: Any, config: TrainingConfig) -> None:
        """Change the loaded model in place, permanently.

        Raises:
            GymError: ``MODEL_INVALID`` for an unsupported model.
        """

    @contextmanager
    def during(self, model: Any, config: TrainingConfig) -> Iterator[None]:
        """Change the model for the duration of the run."""
        yield


def active_features(config: TrainingConfig) -> dict[str, Feature]:
    """Return the features whose keys are set, by name, in alphabetical order.

    A feature from another package with the name of an existing key is ignored, with a warning.

    Raises:
        GymError: ``MISSING_DEPENDENCY`` for an unusable feature from another package.
    """
    own, fields = FEATURES.own(), type(config).model_fields
    shadowed = [name for name in FEATURES.names() if name not in own and name in fields]
    for name in shadowed:
        log.warning(
            "feature %r is ignored: gym-fed has a key of this name; remove the package that adds it", name
        )
    names = (name for name in FEATURES.names() if name not in shadowed)
    return {name: FEATURES.new(name) for name in names if getattr(config, name, None) not in _OFF}


def feature_arguments(config: TrainingConfig) -> dict[str, Any]:
    """Return the trainer arguments of the active features."""
    active = active_features(config).values()
    return {key: value for feature in active for key, value in feature.arguments(config).items()}


def apply_features(model: Any, config: TrainingConfig) -> Any:
    """Apply the features' permanent changes to the model in place, and return it.

    Raises:
        GymError: ``MODEL_INVALID`` if the model does not support a feature; ``CONFIG_INVALID`` for an algorithm or
            packing that conflicts with the changed model.
    """
    from gym_fed.training.rows.packing import require_packable

    for feature in active_features(config).values():
        feature.apply(model, config)
    if getattr(model.config, "mixture_of_depths", None) is not None:  # possibly converted before this run
        conflict = router_conflict(config)
        refuse_first((conflict, f"model: a mixture of depths, but {conflict}", "use a dense model"))
    require_packable(model.config, config)
    return model


@contextmanager
def features_during_run(model: Any, config: TrainingConfig) -> Iterator[None]:
    """Apply the features' temporary changes within a context. Also split rows across processes, if configured."""
    from gym_fed.training.processes.sequence_parallel import sequence_parallel

    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    with ExitStack() as stack:
        stack.enter_context(sequence_parallel(base, config))
        for feature in active_features(config).values():
            stack.enter_context(feature.during(base, config))
        yield


def writes_answers(config: TrainingConfig) -> bool:
    """Return True if the model learns from answers that it generates."""
    writes: bool = ALGORITHMS.type_of(config.algorithm).writes_answers(config)
    return writes


def reference_mode(config: TrainingConfig) -> Literal["training", "evaluation", "either"] | None:
    """Return the mode of the model that computes the reference's log-probabilities; None without a reference.

    A frozen copy or another model is in evaluation mode, like every model before the first step. A model whose adapter
    is temporarily disabled is in the policy's mode. ``either`` is returned for an adapter that does not start at zero:
    its mode is not known before the adapter exists.
    """
    algorithm, tuning = ALGORITHMS.type_of(config.algorithm), TUNING.type_of(config.finetuning)
    if not algorithm.uses_reference:
        return None
    settings = config.chosen_sections().get(config.algorithm)
    beforehand = algorithm.scores_reference_once or getattr(settings, "precompute_ref_log_probs", None)
    if beforehand or not tuning.is_adapter or config.reference_model or config.reference_adapter:
        return "evaluation"
    if config.adapter and not config.new_adapter:
        return "evaluation"  # the saved adapter is scored beforehand, or copied
    return "training" if tuning.starts_as_base(config) else "either"


def router_conflict(config: TrainingConfig) -> str | None:
    """Return the reason why the algorithm does not support a mixture of depths; None if it does."""
    if ALGORITHMS.type_of(config.algorithm).task_type != "CAUSAL_LM" or writes_answers(config):
        return f"{config.algorithm} needs a model that runs every block and has a key-value cache"
    if reference_mode(config) is not None:
        return f"the reference of {config.algorithm} would route different tokens through the blocks than the policy"
    return None
