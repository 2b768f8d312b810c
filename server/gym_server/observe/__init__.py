"""Observability of a hub for its coordinator: metrics for Prometheus, and spans of its rounds."""
