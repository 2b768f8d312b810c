"""Settings of a run's device, dtypes, memory savers, processes, and features of the model's code.

A key that this machine or installation does not support is refused before a model is loaded; see
``gym_fed/training/features``, which has one file per feature.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from gym_fed.config.schema.base import StrictModel

Dtype = Literal["float32", "bfloat16", "float16"]


class RopeScalingConfig(StrictModel):
    """Scaling of rotary positions to rows longer than the model was trained on; names are transformers'."""

    type: Literal["linear", "dynamic", "yarn", "llama3", "longrope"]
    """linear: Chen et al. 2023; dynamic: NTK by length; yarn: Peng et al. 2023; llama3: Llama 3.1's; longrope: Ding et
    al. 2024."""

    factor: float = Field(ge=1)
    """Factor of the row length; ``max_position_embeddings`` is multiplied by it."""

    original_max_position_embeddings: int | None = Field(default=None, ge=1)
    """Row length that the model was trained on; by default that of its config."""

    attention_factor: float | None = Field(default=None, gt=0)
    """yarn and longrope: scale of the attention logits; by default computed from ``factor`` as in the paper."""

    beta_fast: float | None = Field(default=None, gt=0)
    beta_slow: float | None = Field(default=None, gt=0)
    low_freq_factor: float | None = Field(default=None, gt=0)
    high_freq_factor: float | None = Field(default=None, gt=0)
    short_factor: list[float] | None = None
    """longrope: divisors of the ``head_dim / 2`` frequencies, in rows up to the original length."""

    long_factor: list[float] | None = None
    """longrope: divisors of the ``head_dim / 2`` frequencies in longer rows."""

    @model_validator(mode="after")
    def _validate_type(self) -> RopeScalingConfig:
        allowed: dict[str, set[str]] = {
            "yarn": {"attention_factor", "beta_fast", "beta_slow"},
            "llama3": {"low_freq_factor", "high_freq_factor"},
            "longrope": {"attention_factor", "short_factor", "long_factor"},
        }
        required = {"llama3": allowed["llama3"], "longrope": {"short_factor", "long_factor"}}
        given = self.model_fields_set - {"type", "factor", "original_max_position_embeddings"}
        given = {name for name in given if getattr(self, name) is not None}
        if unused := sorted(given - allowed.get(self.type, set())):
            raise ValueError(f"{unused[0]} has no effect with type {self.type}")
        if missing := sorted(required.get(self.type, set()) - given):
            raise ValueError(f"type {self.type} needs {' and '.join(missing)}")
        return self


class ShiftAttentionConfig(StrictModel):
    """S2-Attn of LongLoRA, Chen et al. 2023: attention within groups during training, full attention afterwards."""

    group_size_ratio: float = Field(default=0.25, gt=0, lt=1)
    """Size of a group as a fraction of the row."""


class MixtureOfDepthsConfig(StrictModel):
    """Mixture of depths (Raposo et al. 2024): routers of some blocks select a few tokens; the others skip the block."""

    capacity: float = Field(default=0.125, gt=0, le=1)
    """Fraction of a row's tokens that a routed block computes."""

    every: int = Field(default=2, ge=1)
    """Distance between routed blocks: 2 routes the second, the fourth, and so on."""

    router_loss_weight: float = Field(default=0.01, ge=0)
    """Weight of the loss that trains the router to choose tokens without seeing later ones, as generation needs."""


class ComputeSections(StrictModel):
    """Top-level keys of the YAML file."""

    device: Literal["auto", "cpu", "cuda", "mps"] = "auto"
    """Device; ``auto`` selects CUDA, else MPS, else the CPU."""

    num_threads: int | None = Field(default=None, ge=1)
    """Number of CPU threads, by default torch's choice. A different number may change the last bits of a result."""

    dtype: Dtype = "float32"
    """dtype of the weights during training."""

    base_dtype: Literal["bfloat16", "float16"] | None = None
    """dtype of the frozen weights under an adapter, which is trained in float32; by default ``dtype``."""

    mixed_precision: Literal["no", "bf16", "fp16"] = "no"
    """Compute in 16 bits and keep the weights in float32. ``fp16`` needs a CUDA GPU."""

    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass instead of storing them: less memory, about a third more time."""

    torch_compile: bool = False
    """Compile the model; this pays off only in long runs."""

    torch_compile_backend: str | None = None
    """Backend of torch.compile, ``inductor`` by default; needs ``torch_compile``."""

    attention: Literal["auto", "eager", "sdpa", "flash_attention_2", "flex_attention"] = "auto"
    """Implementation of attention during training. ``auto`` uses torch's (sdpa)."""

    neftune_noise_alpha: float | None = Field(default=None, gt=0)
    """Scale of uniform noise on the embeddings during training (NEFTune, Jain et al. 2023); 5 is typical."""

    rope_scaling: RopeScalingConfig | None = None
    shift_attention: ShiftAttentionConfig | None = None
    mixture_of_depths: MixtureOfDepthsConfig | None = None

    liger: bool = False
    """Use Liger's fused kernels, which need a CUDA GPU."""

    unsloth: bool = False
    """Load and train through Unsloth, which needs a CUDA GPU."""

    @property
    def loaded_dtype(self) -> Dtype:
        """The dtype in which a model's weights are loaded."""
        return self.base_dtype or self.dtype

    @model_validator(mode="after")
    def _validate_features(self) -> ComputeSections:
        if self.torch_compile_backend is not None and not self.torch_compile:
            raise ValueError("torch_compile_backend is set, but torch_compile is off")
        if self.mixed_precision != "no" and self.dtype != "float32":
            raise ValueError(
                f"mixed_precision: {self.mixed_precision} keeps weights in float32, but dtype is {self.dtype}"
            )
        if self.base_dtype is not None and self.dtype != "float32":
            raise ValueError(
                f"base_dtype: weights trained next to it are in float32, but dtype is {self.dtype}"
            )
        if self.shift_attention is not None and self.attention != "auto":
            raise ValueError("attention: shift_attention has its own implementation; leave attention at auto")
        return self


class DistributedSettings(StrictModel):
    """Settings of a run in several processes: ``gym train --nproc N`` on one machine, with ``--nnodes`` on several.

    A batch is ``per_device_train_batch_size`` rows per process, times ``gradient_accumulation_steps``. Under
    ``tensor_parallel`` and ``pipeline_parallel`` all processes work on the same rows, under ``sequence_parallel`` those
    of a group.
    """

    strategy: Literal[
        "ddp", "fsdp2", "deepspeed", "tensor_parallel", "sequence_parallel", "pipeline_parallel"
    ] = "ddp"
    """Strategy. ``ddp`` copies the model to every process; ``fsdp2`` shards weights, gradients and optimiser state
    (transformers' own, at loading); ``deepspeed`` is ZeRO; ``tensor_parallel`` splits layers if transformers has a
    plan for the model; ``sequence_parallel`` splits the tokens of long rows; ``pipeline_parallel`` gives each process
    consecutive layers."""

    zero_stage: Literal[2, 3] | None = None
    """For ``deepspeed``: ZeRO stage; 2 (default) shards gradients and optimiser state, 3 the weights too."""

    cpu_offload: bool = False
    """Keep sharded state in the CPU's memory (``fsdp2``: weights and optimiser; ``deepspeed``: optimiser, and weights
    under stage 3)."""

    sequence_parallel_size: int | None = Field(default=None, ge=2)
    """For ``sequence_parallel``: number of processes that share the tokens of a row; by default all. Groups of them
    work on different rows, as under ``ddp``."""

    pipeline_schedule: Literal["1f1b", "gpipe"] | None = None
    """For ``pipeline_parallel``: order of the micro-batches, which are the ``gradient_accumulation_steps`` of a step.
    ``1f1b`` (default) holds the activations of as many micro-batches as there are stages, ``gpipe`` those of all."""

    world_size: int | None = Field(default=None, ge=1)
    """Required number of processes, since the batch size depends on it; other numbers are refused."""

    backend: Literal["auto", "gloo", "nccl"] = "auto"
    """Communication backend: ``auto`` selects NCCL on CUDA, otherwise gloo."""

    timeout_seconds: float = Field(default=1800.0, gt=0)
    """Time that a process waits for the others."""

    @model_validator(mode="after")
    def _validate_strategy(self) -> DistributedSettings:
        if self.zero_stage is not None and self.strategy != "deepspeed":
            raise ValueError(f"zero_stage applies to strategy deepspeed, not to {self.strategy}")
        if self.cpu_offload and self.strategy not in ("fsdp2", "deepspeed"):
            raise ValueError(f"cpu_offload applies to fsdp2 and deepspeed, not to {self.strategy}")
        if self.sequence_parallel_size is not None and self.strategy != "sequence_parallel":
            raise ValueError(f"sequence_parallel_size applies to sequence_parallel, not to {self.strategy}")
        if self.pipeline_schedule is not None and self.strategy != "pipeline_parallel":
            raise ValueError(f"pipeline_schedule applies to pipeline_parallel, not to {self.strategy}")
        return self


class DistributedSections(StrictModel):
    """Top-level keys of the YAML file."""

    distributed: DistributedSettings | None = None
    """Settings of a run in several processes; by default ``ddp``."""

    @property
    def distributed_strategy(self) -> str:
        """The strategy of ``distributed``; ``ddp`` without the section."""
        return "ddp" if self.distributed is None else self.distributed.strategy

    @property
    def splits_state(self) -> bool:
        """True if weights, gradients and optimiser state are sharded over several processes."""
        return self.distributed_strategy not in ("ddp", "sequence_parallel")

    def data_parallel_size(self, processes: int) -> int:
        """Return the number of processes, or groups of them, that work on different rows."""
        settings = self.distributed
        if settings is None or settings.strategy in ("ddp", "fsdp2", "deepspeed"):
            return processes
        return processes // (settings.sequence_parallel_size or processes)
