"""Features of the model's code, one file each: file name = registry name = key of the YAML's top level."""

from gym_fed.training.features.registry import active_features, apply_features, feature_arguments, featured

__all__ = ["active_features", "apply_features", "feature_arguments", "featured"]
