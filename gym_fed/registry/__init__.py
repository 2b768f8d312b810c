"""Signed versions of models on a store, with lineage and a card: full weights, or a base's digest and a delta."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gym_fed.core.lazy import lazy

if TYPE_CHECKING:
    from gym_fed.registry.manifest import DataUsed as DataUsed
    from gym_fed.registry.manifest import ModelManifest as ModelManifest
    from gym_fed.registry.manifest import ModelVersion as ModelVersion
    from gym_fed.registry.models import ModelRegistry as ModelRegistry

__all__, __getattr__ = lazy(__name__)
