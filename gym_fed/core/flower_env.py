"""Flower's environment, set before its first import: no telemetry, no update check, no installs at run time.

``gym_fed`` imports this first, and every other package of ours imports ``gym_fed`` first; with the three variables
unset every Flower process resolves outside hosts.
"""

from __future__ import annotations

import os

VARIABLES = {
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
}

os.environ.update(VARIABLES)
