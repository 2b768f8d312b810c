"""Config sections of a hub that must not look at single updates: with privacy, or with secure aggregation."""

from __future__ import annotations

from typing import Any

NOTHING_COMPARED: dict[str, Any] = {
    "admission": {"norm_ratio": None},
    "gate": {"screen_updates": False},
    "rewards": {
        "similarity_threshold": None,
        "together_threshold": None,
        "stale_threshold": None,
        "min_norm_ratio": 0,
    },
}
"""Every check and score that compares updates is off."""
