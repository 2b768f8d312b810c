"""Models and data sets of the Hugging Face Hub: offered with bytes and licence, fetched with consent, verified."""

from __future__ import annotations

from gym_fed.base.downloads.ensure import (
    Consent,
    ensure_dataset,
    ensure_model,
    missing_dataset,
    missing_model,
    pull_model,
)
from gym_fed.base.downloads.offer import DownloadOffer, model_config

__all__ = [
    "Consent",
    "DownloadOffer",
    "ensure_dataset",
    "ensure_model",
    "missing_dataset",
    "missing_model",
    "model_config",
    "pull_model",
]
