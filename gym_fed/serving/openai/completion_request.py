"""The schemas of ``POST /v1/completions`` and ``POST /v1/embeddings``."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag, model_validator

from gym_fed.serving.openai.fields import NEUTRAL, Neutral, RequestModel, SamplingFields, off

MAX_PROMPTS = 128
DEFAULT_MAX_TOKENS = 16
"""OpenAI's for completions; a chat's answer may be as long as the context."""

TokenId = Annotated[int, Field(ge=0)]
TokenIds = Annotated[list[TokenId], Field(min_length=1)]
Texts = Annotated[list[str], Field(min_length=1, max_length=MAX_PROMPTS)]
ManyTokenIds = Annotated[list[TokenIds], Field(min_length=1, max_length=MAX_PROMPTS)]


def _kind(value: Any) -> str | None:
    """Which of the four forms is meant, so that what is wrong is told of that one."""
    if not isinstance(value, list):
        return "text" if isinstance(value, str) else None
    first = value[0] if value else ""
    return "texts" if isinstance(first, str) else "many" if isinstance(first, list) else "ids"


Inputs = Annotated[
    Annotated[str, Tag("text")]
    | Annotated[Texts, Tag("texts")]
    | Annotated[TokenIds, Tag("ids")]
    | Annotated[ManyTokenIds, Tag("many")],
    Discriminator(
        _kind,
        custom_error_type="inputs",
        custom_error_message="Input should be a text, token ids, or a list of either",
    ),
]

COMPLETION_NEUTRAL: Neutral = {**NEUTRAL, "suffix": (), "best_of": (1,)}
EMBEDDING_NEUTRAL: Neutral = {"dimensions": ()}


class CompletionRequest(SamplingFields):
    """Text to be continued; several at once are answered at once."""

    prompt: Inputs
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    echo: bool | None = None
    logprobs: Annotated[int, Field(ge=0, le=5)] | None = None

    @model_validator(mode="after")
    def _combinations(self) -> CompletionRequest:
        if self.echo and self.logprobs is not None:
            raise off("echo", "echo with logprobs is not supported: the prompt's logprobs are not kept")
        if len(as_list(self.prompt)) * (self.n or 1) > MAX_PROMPTS:
            raise off("n", f"prompts times n is more than {MAX_PROMPTS}")
        return self


class EmbeddingRequest(RequestModel):
    """Texts whose vectors are wanted."""

    model: str = Field(max_length=256)
    input: Inputs
    encoding_format: Literal["float", "base64"] | None = None
    user: Annotated[str, Field(max_length=256)] | None = None


def as_list(inputs: Inputs) -> list[str] | list[list[int]]:
    """One or several inputs as a list of texts or of token ids."""
    if isinstance(inputs, str):
        return [inputs]
    if isinstance(inputs[0], int):
        return [[int(token) for token in inputs if isinstance(token, int)]]
    return inputs  # of one kind, as the schema saw to
