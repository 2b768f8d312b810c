"""Thousands of variants on disk, verified before use, the recently used ones in memory. Imported on first use."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gym_fed.lazy import lazy

if TYPE_CHECKING:
    from gym_fed.serving.store.records import VariantRecord
    from gym_fed.serving.store.signing import sign_variant
    from gym_fed.serving.store.stats import StoreStats
    from gym_fed.serving.store.store import VariantStore

__all__ = ["StoreStats", "VariantRecord", "VariantStore", "sign_variant"]

__getattr__ = lazy(
    __name__,
    StoreStats="gym_fed.serving.store.stats",
    VariantRecord="gym_fed.serving.store.records",
    VariantStore="gym_fed.serving.store.store",
    sign_variant="gym_fed.serving.store.signing",
)
