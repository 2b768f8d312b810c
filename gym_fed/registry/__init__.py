"""Signed versions of models on a store, with lineage and a card: whole weights, or a base's digest and a delta.

Neighbours: imports base_files, config, data, delta, downloads, errors, evaluation, export, failpoints,
file_lock, files, identity, json_files, lazy, modeling, models, other_words, text, version; imported by cli,
compat, export.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from gym_fed.lazy import lazy

if TYPE_CHECKING:
    from gym_fed.registry.manifest import DataUsed as DataUsed
    from gym_fed.registry.manifest import ModelManifest as ModelManifest
    from gym_fed.registry.manifest import ModelVersion as ModelVersion
    from gym_fed.registry.models import ModelRegistry as ModelRegistry

__all__, __getattr__ = lazy(__name__)
