"""The architecture of a model that starts from random weights."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from gym_fed.config.schema.base import StrictModel


class ModelInit(StrictModel):
    """The architecture of a model that starts from random weights, a decoder."""

    architecture: Literal["qwen3", "llama"] = "qwen3"
    """``qwen3`` norms queries and keys of each head; ``llama`` does not."""

    tokenizer: str = "gym-nano"
    """Where the tokenizer comes from: ``gym-nano`` (bytes), or a model folder."""

    vocab_size: int | None = Field(default=None, ge=1)
    """Rows of the embeddings, at least as many as the tokenizer has tokens; by default as many."""

    hidden_size: int = Field(ge=8)
    num_hidden_layers: int = Field(ge=1)
    intermediate_size: int = Field(ge=8)
    num_attention_heads: int = Field(ge=1)
    num_key_value_heads: int = Field(ge=1)
    head_dim: int = Field(ge=4)
    max_position_embeddings: int = Field(default=256, ge=8)
    rope_theta: float = Field(default=10000.0, gt=0)
    tie_word_embeddings: bool = True

    @model_validator(mode="after")
    def _validate_heads(self) -> ModelInit:
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError("num_attention_heads must be a multiple of num_key_value_heads")
        return self
