"""The ``distributed`` block: how several processes share one run."""

from __future__ import annotations

from typing import Literal

from gym_fed.config.base import StrictModel


class DistributedSettings(StrictModel):
    """Read only when several processes run (``gym train --nproc``, or torchrun)."""

    strategy: Literal["ddp", "fsdp2", "deepspeed", "tensor_parallel"] = "ddp"


class DistributedSections(StrictModel):
    """Keys of the YAML's top level."""

    distributed: DistributedSettings | None = None
