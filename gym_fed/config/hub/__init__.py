"""Schemas of the hub's YAML and of the tasks that it sends."""
