"""The features that a config turns on, and their hooks in a run."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from gym_fed.config.train.training import TrainingConfig
from gym_fed.core.registries import FEATURES
from gym_fed.training.features.base import Feature

log = logging.getLogger("gym_fed")

_OFF = (None, False, "no", "auto")


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
