"""Where variants are kept unless another folder is named."""

from __future__ import annotations

import os
from pathlib import Path


def store_folder(store: Path | None) -> Path:
    """The folder that was named, ``$GYM_HOME/variants``, or ``~/.gym-fed/variants``."""
    return (store or Path(os.environ.get("GYM_HOME") or "~/.gym-fed") / "variants").expanduser()
