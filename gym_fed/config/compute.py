"""What a run computes on and in which numbers: device, types, memory savers, and features of the model's code."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from gym_fed.config.base import StrictModel

Dtype = Literal["float32", "bfloat16", "float16"]


class ComputeSections(StrictModel):
    """Keys of the YAML's top level."""

    device: Literal["auto", "cpu", "cuda", "mps"] = "auto"
    """``auto`` takes CUDA, then MPS, then the CPU."""

    num_threads: int | None = Field(default=None, ge=1)
    """CPU threads; by default torch's own choice. Another number may change the last bits of a result."""

    dtype: Dtype = "float32"
    """Type of the weights while training."""

    gradient_checkpointing: bool = False
