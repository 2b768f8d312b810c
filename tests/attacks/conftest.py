"""Short runs of the attacks of ``benchmarks/attacks.py``, whose scripts lie side by side in no package."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))
