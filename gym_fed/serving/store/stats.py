"""Figures of the store's cache, for `/metrics`."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class StoreStats:
    """Figures of the cache.

    Attributes:
        cache_bytes: Its limit.
        resident: Variants in memory, replaced ones that are still in use too.
        resident_bytes: What they take.
        pinned: Those of them in use.
        loading: Variants that are loading, or waiting for room.
        hits: Uses of a variant that was in memory when it was first requested.
        misses: Uses that had to wait for a load.
        loads: Variants that were loaded.
        evictions: Variants that made room for others.
        errors: Loads that failed.
        load_seconds: Time of all loads together: hashing, verifying, mapping, preparing.
    """

    cache_bytes: int
    resident: int
    resident_bytes: int
    pinned: int
    loading: int
    hits: int
    misses: int
    loads: int
    evictions: int
    errors: int
    load_seconds: float
