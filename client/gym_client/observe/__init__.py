"""Observability of an agent for its contributor: metrics on this machine, and spans of its tasks."""
