"""The importers, in the order in which they are tried."""

from __future__ import annotations

from pathlib import Path

from gym_fed.base.imports.gguf.reader import GgufImporter
from gym_fed.base.imports.importer import Importer
from gym_fed.base.imports.quantised import QuantisedImporter

IMPORTERS: tuple[Importer, ...] = (GgufImporter(), QuantisedImporter())


def importer_of(source: Path) -> Importer | None:
    """Return the importer of ``source``; None for a model folder that needs none."""
    return next((importer for importer in IMPORTERS if importer.takes(source)), None)
