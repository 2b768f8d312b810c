"""Graders: what an answer is worth. One file each; file name = registry name = value of ``graders[].grader``."""
