"""Runs of several processes: launch, communication, and splitting the model."""
