"""The base class of features, and the features that a config turns on.

A feature is a key of the config that changes how the model is computed, not what it learns from.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, ClassVar, Literal

from pydantic import BaseModel

from gym_fed.config.train.training import TrainingConfig
from gym_fed.core.registries import ALGORITHMS, FEATURES, TUNING

_OFF = (None, False, "no", "auto")


class Feature:
    """A key of the top level. Stateless; called only if the key is on."""

    Settings: ClassVar[type[BaseModel] | None] = None
    """Schema of the key, for a feature of another package; None is true or false. Those of ours are keys of the
    config (``gym_fed/config/train/compute.py``), which has their types."""

    per_example: ClassVar[bool] = False
    """True if gradients of single examples (``privacy``) have been tried with it."""

    tried: ClassVar[str] = ""
    """Combinations that the tests run, on a CPU and tiny models; `gym docs members` shows it."""

    def check(self, config: TrainingConfig) -> None:
        """Refuse what this feature, machine or installation cannot honour, before anything is loaded.

        Raises:
            GymError: ``CONFIG_INVALID`` or ``MISSING_DEPENDENCY`` naming the key and the remedy.
        """

    def arguments(self, config: TrainingConfig) -> dict[str, Any]:
        """Return keyword arguments for ``transformers.TrainingArguments``."""
        return {}

    def apply(self, model: Any, config: TrainingConfig) -> None:
        """Change the loaded model in place, for good: the result has the change too.

        Raises:
            GymError: ``MODEL_INVALID`` for a model that cannot be changed so.
        """

    @contextmanager
    def during(self, model: Any, config: TrainingConfig) -> Iterator[None]:
        """Change the model for the duration of the run; afterwards it is as before."""
        yield


def active_features(config: TrainingConfig) -> dict[str, Feature]:
    """Return the features whose keys are on, by name, in alphabetical order.

    A warning names one of another package whose key means something else already; nothing can turn it on.

    Raises:
        GymError: ``MISSING_DEPENDENCY`` for one of another package that cannot be used.
    """
    own, fields = FEATURES.own(), type(config).model_fields
    hidden = [name for name in FEATURES.names() if name not in own and name in fields]
    for name in hidden:
        log.warning("left out: feature %r: its key is one of ours; remove the package that adds it", name)
    names = (name for name in FEATURES.names() if name not in hidden)
    return {name: FEATURES.new(name) for name in names if getattr(config, name, None) not in _OFF}


def feature_arguments(config: TrainingConfig) -> dict[str, Any]:
    """Return the trainer arguments of the active features."""
    active = active_features(config).values()
    return {key: value for feature in active for key, value in feature.arguments(config).items()}


def apply_features(model: Any, config: TrainingConfig) -> Any:
    """Apply the features' lasting changes to the model, in place, and return it.

    Raises:
        GymError: ``MODEL_INVALID`` when the model cannot have a feature; ``CONFIG_INVALID`` for an algorithm that does
            not go with what it has, and for packing that it cannot have.
    """
    from gym_fed.training.features.mixture_of_depths import check_routed
    from gym_fed.training.rows.packing import require_packable

    for feature in active_features(config).values():
        feature.apply(model, config)
    check_routed(model, config)
    require_packable(model.config, config)
    return model


@contextmanager
def featured(model: Any, config: TrainingConfig) -> Iterator[None]:
    """Apply the features' changes that last as long as the run, as a context."""
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    with ExitStack() as stack:
        for feature in active_features(config).values():
            stack.enter_context(feature.during(base, config))
        yield


def writes_answers(config: TrainingConfig) -> bool:
    """Return True if the trained model writes answers that it learns from."""
    writes: bool = ALGORITHMS.type_of(config.algorithm).writes_answers(config)
    return writes


def reference_mode(config: TrainingConfig) -> Literal["training", "evaluation", "either"] | None:
    """Return the mode of the model that computes the reference's log-probabilities; None without a reference.

    A frozen copy or another model is in evaluation mode; so is every model before the first step. A model whose adapter
    is switched off for the moment is in the policy's mode. Whether an adapter that does not start at zero is computed
    beforehand is known only when it is there: ``either``.
    """
    algorithm, tuning = ALGORITHMS.type_of(config.algorithm), TUNING.type_of(config.finetuning)
    if not algorithm.uses_reference:
        return None
    settings = config.chosen_sections().get(config.algorithm)
    beforehand = algorithm.scores_reference_once or getattr(settings, "precompute_ref_log_probs", None)
    if beforehand or not tuning.is_adapter or config.reference_model or config.reference_adapter:
        return "evaluation"
    if config.adapter and not config.new_adapter:
        return "evaluation"  # the adapter as it was: scored beforehand, or a copy
    return "training" if tuning.starts_as_base(config) else "either"


log = logging.getLogger("gym_fed")
