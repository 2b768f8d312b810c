"""LLaMA-Factory's YAML files: told from our own, translated, and what has no counterpart is named with its line."""

from gym_fed.config.llamafactory.files import load_training_config
from gym_fed.config.llamafactory.ledger import Translation, is_llamafactory
from gym_fed.config.llamafactory.translate import translate

__all__ = ["Translation", "is_llamafactory", "load_training_config", "translate"]
