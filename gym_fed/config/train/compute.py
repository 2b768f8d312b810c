"""What a run computes on and in which numbers: device, types, memory savers, and features of the model's code.

A key that this machine or installation cannot honour is refused before a model is loaded; see
``gym_fed/training/features``, where each feature has a file.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from gym_fed.config.schema.base import StrictModel

Dtype = Literal["float32", "bfloat16", "float16"]


class RopeScalingConfig(StrictModel):
    """Rotary positions beyond the length that the model was trained on; words are transformers'."""

    type: Literal["linear", "dynamic", "yarn", "llama3", "longrope"]
    """linear: Chen et al. 2023; dynamic: NTK by length; yarn: Peng et al. 2023; llama3: Llama 3.1's; longrope: Ding et
    al. 2024."""

    factor: float = Field(ge=1)
    """How many times longer rows may be; the model's ``max_position_embeddings`` is raised by it."""

    original_max_position_embeddings: int | None = Field(default=None, ge=1)
    """Length the model was trained on; by default that of its config."""

    attention_factor: float | None = Field(default=None, gt=0)
    """yarn and longrope: scale of the attention's logits; by default the paper's, which follows from ``factor``."""

    beta_fast: float | None = Field(default=None, gt=0)
    beta_slow: float | None = Field(default=None, gt=0)
    low_freq_factor: float | None = Field(default=None, gt=0)
    high_freq_factor: float | None = Field(default=None, gt=0)
    short_factor: list[float] | None = None
    """longrope: a divisor for each of ``head_dim / 2`` frequencies, in rows no longer than the original length."""

    long_factor: list[float] | None = None
    """longrope: the same in longer rows."""

    @model_validator(mode="after")
    def _words_of_the_type(self) -> RopeScalingConfig:
        may: dict[str, set[str]] = {
            "yarn": {"attention_factor", "beta_fast", "beta_slow"},
            "llama3": {"low_freq_factor", "high_freq_factor"},
            "longrope": {"attention_factor", "short_factor", "long_factor"},
        }
        must = {"llama3": may["llama3"], "longrope": {"short_factor", "long_factor"}}
        given = self.model_fields_set - {"type", "factor", "original_max_position_embeddings"}
        given = {name for name in given if getattr(self, name) is not None}
        if idle := sorted(given - may.get(self.type, set())):
            raise ValueError(f"{idle[0]} means nothing to type {self.type}")
        if missing := sorted(must.get(self.type, set()) - given):
            raise ValueError(f"type {self.type} needs {' and '.join(missing)}")
        return self


class ShiftAttentionConfig(StrictModel):
    """S2-Attn of LongLoRA, Chen et al. 2023: attention within groups while training, full attention afterwards."""

    group_size_ratio: float = Field(default=0.25, gt=0, lt=1)
    """Size of a group as a share of the row."""


class MixtureOfDepthsConfig(StrictModel):
    """Raposo et al. 2024: a router in every so many blocks lets few tokens through; the others pass by unchanged."""

    capacity: float = Field(default=0.125, gt=0, le=1)
    """Share of a row's tokens that a routed block computes."""

    every: int = Field(default=2, ge=1)
    """Every so many blocks one is routed: with 2, the second, the fourth, and so on."""

    router_loss_weight: float = Field(default=0.01, ge=0)
    """Weight of the loss that teaches the router to foresee, without looking ahead, which tokens it lets through."""


class ComputeSections(StrictModel):
    """Keys of the YAML's top level."""

    device: Literal["auto", "cpu", "cuda", "mps"] = "auto"
    """``auto`` takes CUDA, then MPS, then the CPU."""

    num_threads: int | None = Field(default=None, ge=1)
    """CPU threads; by default torch's own choice. Another number may change the last bits of a result."""

    dtype: Dtype = "float32"
    """Type of the weights while training."""

    base_dtype: Literal["bfloat16", "float16"] | None = None
    """Type of the frozen weights under an adapter, which is trained in float32; by default ``dtype``."""

    mixed_precision: Literal["no", "bf16", "fp16"] = "no"
    """Compute in 16 bits while the weights stay in float32. ``fp16`` needs a CUDA GPU."""

    gradient_checkpointing: bool = False
    """Compute activations again on the way back instead of keeping them: less memory, about a third more time."""

    torch_compile: bool = False
    """Compile the model; pays off on long runs only."""

    torch_compile_backend: str | None = None
    """A backend of torch.compile (``inductor`` by default); goes with ``torch_compile``."""

    attention: Literal["auto", "eager", "sdpa", "flash_attention_2", "flex_attention"] = "auto"
    """Implementation of attention while training. ``auto`` is torch's own (sdpa)."""

    neftune_noise_alpha: float | None = Field(default=None, gt=0)
    """Uniform noise on the embeddings while training, Jain et al. 2023; 5 is usual."""

    rope_scaling: RopeScalingConfig | None = None
    shift_attention: ShiftAttentionConfig | None = None
    mixture_of_depths: MixtureOfDepthsConfig | None = None

    liger: bool = False
    """Liger's fused kernels; need a CUDA GPU."""

    unsloth: bool = False
    """Load and train through Unsloth; needs a CUDA GPU."""

    @property
    def loaded_dtype(self) -> Dtype:
        """The type that a model's weights are read in."""
        return self.base_dtype or self.dtype

    @model_validator(mode="after")
    def _features_agree(self) -> ComputeSections:
        if self.torch_compile_backend is not None and not self.torch_compile:
            raise ValueError("torch_compile_backend: is given, but torch_compile is off")
        if self.mixed_precision != "no" and self.dtype != "float32":
            raise ValueError(
                f"mixed_precision: {self.mixed_precision} keeps weights in float32, but dtype is {self.dtype}"
            )
        if self.base_dtype is not None and self.dtype != "float32":
            raise ValueError(
                f"base_dtype: what is trained beside it is in float32, but dtype is {self.dtype}"
            )
        if self.shift_attention is not None and self.attention != "auto":
            raise ValueError("attention: shift_attention has its own; leave attention at auto")
        return self
