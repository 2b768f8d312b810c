"""Robust aggregation and merging of updates (DeltaSoup)."""
