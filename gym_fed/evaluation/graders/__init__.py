"""Graders, which score answers. Each has its own file, whose name is the registry name and the value of
``graders[].grader``."""
