"""Observability of a hub: Prometheus metrics, and tracing spans of its rounds."""
