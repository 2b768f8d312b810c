"""Graders: what an answer is worth. One file each; file name = registry name = value of ``rewards[].grader``."""

from gym_fed.evaluation.graders.base import Grader, Sample

__all__ = ["Grader", "Sample"]
