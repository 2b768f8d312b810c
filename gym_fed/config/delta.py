"""How a delta is written down: the codec, what becomes of small tensors, and the byte budget of the file."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from gym_fed.config.base import StrictModel


class CodecPolicy(StrictModel):
    """Codec policy of a contributor's update, or of a soup."""

    codec: Literal["bitdelta", "dense", "lora"] = "bitdelta"
    """Codec of matrices: sign bits, the values themselves, or the factors of a truncated SVD."""

    group_size: Annotated[int, Field(ge=8)] | Literal["row", "auto"] | None = None
    """bitdelta: columns that share a scale; ``row`` for one scale a row, absent for one a tensor. ``auto`` gives a
    tensor row scales where those bytes keep more of its energy than its bits do: embeddings, mostly, whose rows
    change by very different amounts."""

    scale_dtype: Literal["float32", "bfloat16"] = "float32"
    """bitdelta: number format of the scales."""

    dense_dtype: Literal["bfloat16", "float32"] = "bfloat16"
    """Number format of dense tensors."""

    lora_rank: Annotated[int, Field(ge=1)] | None = None
    """lora: rank of the factors; required there."""

    small_tensors: Literal["dense", "bitdelta"] = "dense"
    """Codec of norms, biases and all else that is one-dimensional or at most ``small_max_elements`` large."""

    small_max_elements: Annotated[int, Field(ge=0)] = 256
    """Up to how many elements a matrix counts as small."""

    max_bits_per_weight: Annotated[float, Field(gt=0)] | None = None
    """Budget for the whole file, header included: weights of the base times this many bits. Tensors that do
    not fit stay in the error-feedback residual, so this needs ``error_feedback``."""

    error_feedback: bool = True
    """Add what one round's encoding lost to the next round's delta."""

    @model_validator(mode="after")
    def _consistent(self) -> CodecPolicy:
        if self.max_bits_per_weight is not None and not self.error_feedback:
            raise ValueError(
                "max_bits_per_weight leaves tensors out of the file, which loses them for good without "
                "error_feedback; set error_feedback: true or remove the budget"
            )
        uses_bits = self.codec == "bitdelta" or self.small_tensors == "bitdelta"
        if not uses_bits and (self.group_size is not None or self.scale_dtype != "float32"):
            raise ValueError(
                f"group_size and scale_dtype belong to bitdelta, which codec {self.codec!r} does not use"
            )
        if (self.codec == "lora") != (self.lora_rank is not None):
            raise ValueError("lora_rank is required for codec 'lora' and belongs to no other")
        return self
