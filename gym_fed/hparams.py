"""LLaMA-Factory's name for the module that parses its arguments."""

from gym_fed.interop.arguments import GROUPS, Arguments, get_train_args

__all__ = ["GROUPS", "Arguments", "get_train_args"]
