"""Settings of the quantisers: codec policies and calibration text. No torch here."""

from __future__ import annotations

from enum import Enum
from typing import Annotated, Any, ClassVar, Literal, Self

from gym_quant.registry import CODECS
from pydantic import Field, model_validator

from gym_fed.config.delta import CodecPolicy, MenuCodec, PartCodec, SmallCodec
from gym_fed.config.schema.base import AcceptsAliases, StrictModel
from gym_fed.config.schema.member import MemberOf


class QuantMethod(Enum):
    """DeltaQuant's codecs, smallest first; the value is the codec's name."""

    BINARY = "binary"
    TERNARY = "ternary"
    INT2 = "int2"
    INT4 = "int4"
    INT8 = "int8"


class Calibration(StrictModel):
    """Settings of calibration text and of the models before and after alignment."""

    distill_steps: Annotated[int, Field(ge=0, le=10_000)] = 0
    """Number of steps of scale distillation against the tuned model's logits; 0 disables it."""

    distill_bits: bool = False
    """Train the bits of ``bitdelta`` tensors as well as the scales. Beyond BitDelta: the bits are then no longer all
    the signs of the delta, and the same bytes preserve more of the fine-tune."""

    distill_loss: Literal["mse", "kl"] = "kl"
    """Loss: ``mse`` of the logits, as in BitDelta's paper, or ``kl``, the divergence of the models' predictions."""

    distill_lr: Annotated[float, Field(gt=0)] = 5e-2
    """Peak learning rate of the logarithm of a scale (a step of 0.05 changes a scale by about 5%)."""

    distill_batch: Annotated[int, Field(ge=1)] = 4
    """Number of sequences per step."""

    distill_bits_lr: Annotated[float, Field(gt=0)] = 1e-2
    """Peak learning rate of the numbers whose signs are the bits, in units of the scale."""

    calibration_samples: Annotated[int, Field(ge=0)] = 256
    """Number of sequences of ``max_length`` tokens from the calibration text, evenly spaced; 0 uses none."""

    max_length: Annotated[int, Field(ge=2)] = 128
    """Maximum number of tokens per sequence: texts are joined and split, conversations are truncated."""

    seed: Annotated[int, Field(ge=0)] = 0
    """Seed of the order of batches. The same seed on the same machine gives the same bytes."""

    safety_threshold: Annotated[float, Field(ge=0, le=1)] | None = None
    """Safe LoRA (Hsu et al. 2024): a layer whose delta has a cosine similarity below this with its projection onto
    the aligned subspace is replaced by that projection. Needs the model ``unaligned``; ``aligned`` is the base unless
    given."""

    safety_projection: Literal["fast", "exact"] = "fast"
    """``fast``: V V^T / |V|, the paper's choice. ``exact``: the orthogonal projection onto V's columns."""

    @model_validator(mode="after")
    def _distillation_has_text(self) -> Self:
        if self.distill_steps and not self.calibration_samples:
            raise ValueError(
                f"distill_steps: {self.distill_steps} needs text; set calibration_samples above 0"
            )
        if self.distill_bits and not self.distill_steps:
            raise ValueError("distill_bits: true does nothing without distill_steps above 0")
        return self


_CHOSEN_BY_COMPACT = (
    *("embeddings", "head", "small_tensors", "small_max_elements", "dense_dtype"),
    *("factors", "factor_bits", "factor_group_size"),
)


class CalibratedPolicy(CodecPolicy, Calibration):
    """A codec policy with calibration, for a single file."""

    _rank_is_needed: ClassVar[bool] = False

    codec: Annotated[str, MemberOf(CODECS, ("compact", "auto"))] = "compact"
    """Codec of matrices. ``compact`` gives every tensor the smallest codec within ``max_error``, and keeps the factors
    of a LoRA run where they are smaller. ``auto`` splits ``max_bits_per_weight``."""

    max_error: Annotated[float, Field(ge=0, lt=1)] = 0.01
    """compact: maximum relative error of each tensor; 0 keeps every bit."""

    error_feedback: Literal[False] = False
    """Error feedback is off: a single file has no next round."""

    menu: tuple[MenuCodec, ...] | None = None
    """Codecs that ``codec: auto`` chooses from with ``max_bits_per_weight``; by default all built-in ones."""

    @model_validator(mode="after")
    def _one_file_by_itself(self) -> Self:
        compact = self.codec == "compact"
        if compact and (chosen := [key for key in _CHOSEN_BY_COMPACT if self._differs(key)]):
            raise ValueError(
                f"codec 'compact' chooses codecs itself: remove {', '.join(chosen)}, or choose a codec"
            )
        if not compact and self._differs("max_error"):
            raise ValueError(f"max_error applies only to codec 'compact', not to {self.codec!r}")
        if self.menu is not None and (not self.menu or self.max_bits_per_weight is None):
            raise ValueError("menu lists the codecs for a budget; set codec: auto and max_bits_per_weight")
        return self


class _Method(Calibration):
    """The method-specific names of policy keys, with the policy's defaults."""

    group_size: Annotated[int, Field(ge=8)] | Literal["row"] | None = None
    """Columns that share a scale; ``row`` for one scale per row."""

    scale_dtype: Literal["float32", "bfloat16"] = CodecPolicy.model_fields["scale_dtype"].default
    """Number format of the scales."""

    embeddings: PartCodec = CodecPolicy.model_fields["embeddings"].default
    """Codec of the embeddings, and of a head that is not tied to them."""

    norms: SmallCodec = CodecPolicy.model_fields["small_tensors"].default
    """Codec of norms, biases and other small tensors."""

    def policy(self) -> CalibratedPolicy:
        """Return the settings under the policy's keys."""
        shared = {key: value for key, value in self if key in CalibratedPolicy.model_fields}
        return CalibratedPolicy(
            **{
                **shared,
                "codec": "bitdelta",
                "head": self.embeddings,
                "small_tensors": self.norms,
                **self._own(),
            }
        )

    def _own(self) -> dict[str, Any]:
        """Return the policy keys that only this method sets."""
        return {}

    @model_validator(mode="after")
    def _is_a_policy(self) -> Self:
        if self.model_fields_set:
            self.policy()
        return self


class BitDeltaConfig(_Method, AcceptsAliases):
    """Settings of BitDelta (Liu et al. 2024): signs and distilled scales for matrices, other codecs for the rest."""

    bits: Literal[1] = 1
    """Bits per weight of a matrix."""

    distill_steps: Annotated[int, Field(ge=0, le=10_000)] = 100
    """Number of steps of scale distillation against the tuned model's logits; 0 disables it. The paper uses 200."""


class DeltaQuantConfig(_Method):
    """DeltaQuant: uniform, ternary or binary levels, calibrated with the layers' inputs."""

    method: QuantMethod = QuantMethod.INT4
    """Codec of matrices. With ``max_bits_per_weight`` it is the largest that a matrix may get: bits go where the
    calibration text says that they lower the layers' output error most."""

    per_channel: bool = True
    """True for one scale per row (output channel), False for one per tensor."""

    symmetric: bool = True
    """True for levels symmetric about zero, False for an offset per group."""

    max_bits_per_weight: Annotated[float, Field(gt=0)] | None = None
    """Maximum number of bits of the file per weight of the base."""

    def _own(self) -> dict[str, Any]:
        values: dict[str, Any] = {"codec": self.method.value}
        if self.max_bits_per_weight is not None:
            names = [method.value for method in QuantMethod]
            values = {"codec": "auto", "menu": tuple(names[: names.index(self.method.value) + 1])}
        return values if self.per_channel else {**values, "group_size": "tensor"}

    @model_validator(mode="after")
    def _groups_are_of_channels(self) -> DeltaQuantConfig:
        if self.group_size is not None and not self.per_channel:
            raise ValueError(
                f"group_size: {self.group_size} divides channels; set per_channel: true, or drop group_size"
            )
        return self
