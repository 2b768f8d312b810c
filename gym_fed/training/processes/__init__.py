"""Runs with several processes: launch, communication, and splitting the model."""
