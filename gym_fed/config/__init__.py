"""Pydantic schemas of every YAML file, with errors that name file, line and column. No ML imports here."""

from gym_fed.config.base import StrictModel
from gym_fed.config.training import TrainingConfig
from gym_fed.config.yaml_file import dump_yaml, load_config, parse_overrides

__all__ = ["StrictModel", "TrainingConfig", "dump_yaml", "load_config", "parse_overrides"]
