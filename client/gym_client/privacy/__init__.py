"""Differential privacy and secure aggregation on the contributor's side."""
