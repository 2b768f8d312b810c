"""Differential privacy and secure aggregation on the hub."""
