"""Datasets: formats, generated text tasks, and encoding for training. Names are imported on first use."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gym_fed.core.lazy import lazy

if TYPE_CHECKING:
    from gym_fed.data.encoding import encode_rows as encode_rows
    from gym_fed.data.generated import generate as generate
    from gym_fed.data.generated import generate_mix as generate_mix
    from gym_fed.data.pipeline import DataPipeline as DataPipeline
    from gym_fed.data.reading import load_rows as load_rows
    from gym_fed.data.registry import DatasetRegistry as DatasetRegistry

__all__, __getattr__ = lazy(__name__)
