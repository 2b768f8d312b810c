"""The ``distributed`` block: how several processes share one run."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from gym_fed.config.schema.base import StrictModel


class DistributedSettings(StrictModel):
    """Settings of a run in several processes: ``gym train --nproc N`` on one machine, or torchrun on several.

    A batch is ``per_device_train_batch_size`` rows per process, times ``gradient_accumulation_steps``; under
    ``tensor_parallel`` all processes work on the same rows.
    """

    strategy: Literal["ddp", "fsdp2", "deepspeed", "tensor_parallel"] = "ddp"
    """``ddp`` keeps the whole model in every process; ``fsdp2`` shards weights, gradients and optimiser state
    (transformers' own, at loading); ``deepspeed`` is ZeRO; ``tensor_parallel`` splits layers where transformers has a
    plan for the model."""

    zero_stage: Literal[2, 3] | None = None
    """For ``deepspeed``: 2 shards gradients and optimiser state, 3 the weights too. Default 2."""

    cpu_offload: bool = False
    """Keep what is sharded in the CPU's memory (``fsdp2``: weights and optimiser; ``deepspeed``: optimiser, and weights
    under stage 3)."""

    world_size: int | None = Field(default=None, ge=1)
    """Number of processes that the run is for; its batch depends on it. Any other number is refused."""

    backend: Literal["auto", "gloo", "nccl"] = "auto"
    """Communication between processes: ``auto`` takes NCCL on CUDA, gloo otherwise."""

    timeout_seconds: float = Field(default=1800.0, gt=0)
    """How long a process waits for the others before the run fails."""

    @model_validator(mode="after")
    def _validate_strategy(self) -> DistributedSettings:
        if self.zero_stage is not None and self.strategy != "deepspeed":
            raise ValueError(f"zero_stage is for strategy deepspeed, not for {self.strategy}")
        if self.cpu_offload and self.strategy not in ("fsdp2", "deepspeed"):
            raise ValueError(f"cpu_offload is for fsdp2 and deepspeed, not for {self.strategy}")
        return self


class DistributedSections(StrictModel):
    """Keys of the YAML's top level."""

    distributed: DistributedSettings | None = None
    """How several processes share the run; ``ddp`` when not given."""

    @property
    def distributed_strategy(self) -> str:
        """The strategy of ``distributed``; ``ddp`` without the section."""
        return "ddp" if self.distributed is None else self.distributed.strategy
