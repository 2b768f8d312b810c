"""Observability of the agent for the contributor: metrics on this machine, and spans of its tasks."""
