"""Graders, which score answers. One file each; file name = registry name = value of ``graders[].grader``."""
