"""Formats of datasets, one file each: how a raw row becomes a row of ``gym_fed.data.rows``, and back."""
