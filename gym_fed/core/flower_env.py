"""Environment of Flower, set before its first import: no telemetry, update check or installs at run time.

``gym_fed`` imports this module first, and all our other packages import ``gym_fed`` first. Without the three
variables every Flower process contacts external hosts.
"""

from __future__ import annotations

import os

VARIABLES = {
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
}

os.environ.update(VARIABLES)
