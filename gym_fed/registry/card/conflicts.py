"""Licences that do not go together: of a model, of its base, and of the data that it learned from.

This is no legal advice. It names what the licences' own texts say, so that a person decides knowingly: whether a
licence of rows binds a model that learned from them differs between countries.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from gym_fed.registry.manifest import NOT_STATED, ModelManifest

_NON_COMMERCIAL = re.compile(r"-nc\b|-nc-|non-?commercial", re.IGNORECASE)
_NO_DERIVATIVES = re.compile(r"-nd\b|-nd-", re.IGNORECASE)
_SHARE_ALIKE = re.compile(r"-sa-|-sa\b|^a?gpl|^lgpl|^odbl|^eupl|sharing", re.IGNORECASE)


def conflicts(manifest: ModelManifest) -> list[str]:
    """One sentence for each, naming both sides; empty where nothing is known to conflict."""
    found = []
    own = manifest.licence
    for what, licence in _parts(manifest):
        if licence is None or licence == NOT_STATED:
            found.append(f"{what}: licence not stated, so whether the model may be passed on is not known")
            continue
        parts = re.split(r"\s+(?:AND|OR)\s+", licence)
        if any(_NO_DERIVATIVES.search(part) for part in parts):
            found.append(f"{what}: {licence} allows no derivatives")
        if any(_NON_COMMERCIAL.search(part) for part in parts) and not _NON_COMMERCIAL.search(own):
            found.append(
                f"{what}: {licence} forbids commercial use, and the model's licence {_shown(own)} does not"
            )
        if any(_SHARE_ALIKE.search(part) for part in parts) and own.lower() != licence.lower():
            found.append(
                f"{what}: {licence} wants the same licence for what is made from it, and the model has {_shown(own)}"
            )
    if own == NOT_STATED:
        found.append("the model's own licence is not stated: nobody may use it")
    return found


def _parts(manifest: ModelManifest) -> Iterator[tuple[str, str | None]]:
    if manifest.base is not None:
        yield f"base {manifest.base.name}", manifest.base.licence
    for data in manifest.lineage.data:
        yield f"data {data.name}", data.licence


def _shown(licence: str) -> str:
    return "not stated" if licence == NOT_STATED else licence
