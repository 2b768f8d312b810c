"""The standalone trainer, and the training algorithms in one registry."""

from gym_fed.core.library_env import settle

settle()  # before a module of this package imports a training library
