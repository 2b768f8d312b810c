"""Downloads from the Hugging Face Hub: size and licence shown first, consent, verified files."""

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
