"""Finds features by file name; to add one, drop ``KEY.py`` with one subclass of ``Feature`` into this folder."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

from gym_fed.config.training import TrainingConfig
from gym_fed.training.registry import Registry

if TYPE_CHECKING:
    from gym_fed.training.features.base import Feature

_FEATURES: Registry[Feature] = Registry("gym_fed.training.features", "feature")
_OFF = (None, False, "no", "auto")


def feature_names() -> list[str]:
    """Every feature, in alphabetical order: each is a key of ``TrainingConfig``."""
    return _FEATURES.names()


def active_features(config: TrainingConfig) -> list[Feature]:
    """The features whose keys are on, in alphabetical order."""
    from gym_fed.training.features.base import Feature

    return [_FEATURES.get(name, Feature) for name in feature_names() if getattr(config, name) not in _OFF]


def feature_arguments(config: TrainingConfig) -> dict[str, Any]:
    """What the active features add to the arguments of every trainer."""
    return {key: value for one in active_features(config) for key, value in one.arguments(config).items()}


def apply_features(model: Any, config: TrainingConfig) -> Any:
    """The model with the changes that stay; it is changed in place.

    Raises:
        GymError: ``MODEL_INVALID`` when the model cannot have a feature; ``CONFIG_INVALID`` for an algorithm that does
            not go with what it has.
    """
    from gym_fed.training.features.mixture_of_depths import check_routed

    for feature in active_features(config):
        feature.apply(model, config)
    check_routed(model, config)
    return model


@contextmanager
def featured(model: Any, config: TrainingConfig) -> Iterator[None]:
    """The model with the changes that last as long as the run."""
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    with ExitStack() as stack:
        for feature in active_features(config):
            stack.enter_context(feature.during(base, config))
        yield
