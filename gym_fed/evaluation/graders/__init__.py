"""Graders: what an answer is worth. One file each; file name = registry name = value of ``rewards[].grader``."""

from gym_fed.evaluation.graders._combined import CombinedGrader
from gym_fed.evaluation.graders._server import reward_server
from gym_fed.evaluation.graders.base import Grader, Sample
from gym_fed.evaluation.graders.registry import build_graders

__all__ = ["CombinedGrader", "Grader", "Sample", "build_graders", "reward_server"]
