"""Datasets: formats, the generated text tasks, and what a trainer sees. Names are imported on first use."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gym_fed.lazy import lazy

if TYPE_CHECKING:
    from gym_fed.data.encoding import encode_rows
    from gym_fed.data.pipeline import DataPipeline
    from gym_fed.data.reading import load_rows
    from gym_fed.data.registry import DatasetRegistry
    from gym_fed.data.tasks import generate, generate_mix

__all__ = [
    "DataPipeline",
    "DatasetRegistry",
    "encode_rows",
    "generate",
    "generate_mix",
    "load_rows",
]

__getattr__ = lazy(
    __name__,
    DataPipeline="gym_fed.data.pipeline",
    DatasetRegistry="gym_fed.data.registry",
    encode_rows="gym_fed.data.encoding",
    generate="gym_fed.data.tasks",
    generate_mix="gym_fed.data.tasks",
    load_rows="gym_fed.data.reading",
)
