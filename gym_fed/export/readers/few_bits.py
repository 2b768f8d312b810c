"""Reads folders of AWQ and GPTQ by unpacking them with this project's reader, since gptqmodel cannot be installed
alongside, and then with transformers."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from gym_fed.base.imports.quantised import QuantisedImporter
from gym_fed.export.readers.reading import LoadedExport
from gym_fed.export.readers.transformers import LIBRARIES
from gym_fed.export.readers.transformers import load as load_plain

__all__ = ["LIBRARIES", "load"]


def load(parts: dict[str, Any]) -> LoadedExport:
    """Load the model of ``parts["model"]`` in float32, its packed weights rounded to the dtype of their scales."""
    model = Path(parts["model"])
    with tempfile.TemporaryDirectory(prefix="gym-export-", dir=model.parent) as folder:
        QuantisedImporter().write(model, Path(folder), lambda _done, _all: None)
        return load_plain({**parts, "model": folder})
