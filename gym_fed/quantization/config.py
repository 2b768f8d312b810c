"""Settings of the quantisers. No torch here."""

from __future__ import annotations

from enum import Enum
from typing import Annotated, Literal

from pydantic import Field, model_validator

from gym_fed.config.base import StrictModel

EmbeddingCodec = Literal["int8", "int4", "bitdelta-row", "bitdelta", "dense"]
"""Codec of embeddings and head: rows of int8 or int4, signs with a scale a row or a tensor, or bfloat16."""

NormCodec = Literal["dense", "int8", "bitdelta"]
"""Codec of norms, biases and all else that is one-dimensional: bfloat16, int8, or signs with one scale."""


class QuantMethod(Enum):
    """DeltaQuant's codecs; the value is the codec's name."""

    INT2 = "int2"
    INT4 = "int4"
    INT8 = "int8"
    BINARY = "binary"
    TERNARY = "ternary"


class QuantizerConfig(StrictModel):
    """What both quantisers share: calibration text, distillation, safety."""

    embeddings: EmbeddingCodec = "int8"
    """Codec of the embeddings, and of the head where it is not tied to them."""

    norms: NormCodec = "dense"
    """Codec of one-dimensional tensors."""

    scale_dtype: Literal["float32", "bfloat16"] = "bfloat16"
    """Number format of the scales."""

    distill_steps: Annotated[int, Field(ge=0)] = 0
    """Steps of scale distillation against the tuned model's logits; 0 for none."""

    distill_loss: Literal["mse", "kl"] = "kl"
    """``mse`` of the logits, as in BitDelta's paper, or ``kl``, the divergence of what the models predict."""

    distill_lr: Annotated[float, Field(gt=0)] = 5e-2
    """Peak learning rate of the logarithm of a scale (a step of 0.05 changes a scale by about 5%)."""

    distill_batch: Annotated[int, Field(ge=1)] = 4
    """Sequences a step."""

    distill_bits: bool = False
    """Train the bits of ``bitdelta`` tensors beside the scales. Beyond BitDelta: the bits are then no longer all the
    signs of the delta, and more of the fine-tune is kept in the same bytes."""

    distill_bits_lr: Annotated[float, Field(gt=0)] = 1e-2
    """Peak learning rate of the numbers whose signs are the bits, in units of the scale."""

    calibration_samples: Annotated[int, Field(ge=0)] = 256
    """Sequences of ``max_length`` tokens taken from the calibration text, evenly spaced; 0 uses none."""

    max_length: Annotated[int, Field(ge=2)] = 128
    """Tokens a sequence: texts are joined and cut, conversations are cut."""

    seed: Annotated[int, Field(ge=0)] = 0
    """Decides the order of the batches. The same seed on the same machine gives the same bytes."""

    safety_threshold: Annotated[float, Field(ge=0, le=1)] | None = None
    """Safe LoRA (Hsu et al. 2024): a layer whose delta has a cosine similarity below this with its projection onto
    the aligned subspace is replaced by that projection. Needs the pair ``aligned`` and ``unaligned``."""

    safety_projection: Literal["fast", "exact"] = "fast"
    """``fast``: V V^T / |V|, the paper's choice. ``exact``: the orthogonal projection onto V's columns."""

    @model_validator(mode="after")
    def _distillation_has_text(self) -> QuantizerConfig:
        if self.distill_steps and not self.calibration_samples:
            raise ValueError(
                f"distill_steps: {self.distill_steps} needs text; set calibration_samples above 0"
            )
        if self.distill_bits and not self.distill_steps:
            raise ValueError("distill_bits: true does nothing without distill_steps above 0")
        return self


class BitDeltaConfig(QuantizerConfig):
    """BitDelta (Liu et al. 2024): signs and scales for matrices, distilled; other codecs for the rest."""

    bits: Literal[1] = 1
    """Bits a weight of a matrix."""

    group_size: Annotated[int, Field(ge=8)] | Literal["row"] | None = 128
    """Columns that share a scale; ``row`` for one scale a row, None for one a tensor, as in the paper."""

    distill_steps: Annotated[int, Field(ge=0)] = 100
    """Steps of scale distillation against the tuned model's logits; 0 for none. The paper takes 200."""


class DeltaQuantConfig(QuantizerConfig):
    """DeltaQuant: evenly spaced, ternary or binary levels, calibrated by the layers' inputs."""

    method: QuantMethod = QuantMethod.INT4
    """Codec of matrices."""

    per_channel: bool = True
    """A scale for each row (output channel); otherwise one a tensor."""

    group_size: Annotated[int, Field(ge=8)] | None = None
    """Columns that share a scale, instead of a whole row."""

    symmetric: bool = True
    """Levels around zero; otherwise each group has an offset too."""

    embeddings: EmbeddingCodec | Literal["same"] = "same"  # type: ignore[assignment]
    """Codec of the embeddings and the head; ``same`` as other matrices."""

    max_bits_per_weight: Annotated[float, Field(gt=0)] | None = None
    """Budget for the whole file. With it ``method`` is the most a matrix may get: bits go where the calibration
    text says that they lower the layers' output error most."""

    @model_validator(mode="after")
    def _groups_are_of_channels(self) -> DeltaQuantConfig:
        if self.group_size is not None and not self.per_channel:
            raise ValueError(
                f"group_size: {self.group_size} divides channels; set per_channel: true, or drop group_size"
            )
        return self
