"""Models and data sets of the Hugging Face Hub: offered with bytes and licence, fetched with consent, verified.

Neighbours: imports config, console, data, errors, files, imports, json_files, models, text, version; imported
by cli, data, evaluation, planning, registry, training, webui.
"""

from __future__ import annotations

from gym_fed.downloads.ensure import (
    Consent,
    ensure_dataset,
    ensure_model,
    missing_dataset,
    missing_model,
    pull_model,
)
from gym_fed.downloads.offer import DownloadOffer, model_config

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
