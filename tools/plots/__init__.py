"""Plots of the tables in docs/ that quote benchmarks."""
