"""What chat and completions have in common: how tokens are chosen, when to stop, and how the answer is sent."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BeforeValidator, Field, model_validator

from gym_fed.serving.openai.fields import Neutral, RequestModel, off, only
from gym_fed.serving.request import SamplingParams

MAX_CHOICES = 16
MAX_LOGIT_BIASES = 1024
_MAX_DIGITS = 12

Temperature = Annotated[float, Field(ge=0, le=2)]
Share = Annotated[float, Field(gt=0, le=1)]
Penalty = Annotated[float, Field(ge=-2, le=2)]
StopText = Annotated[str, Field(min_length=1, max_length=256)]
Bias = Annotated[float, Field(ge=-100, le=100)]

NEUTRAL: Neutral = {
    "store": (False,),
    "metadata": ({},),
    "service_tier": ("auto", "default"),
    "safety_identifier": (),
    "prompt_cache_key": (),
    "prompt_cache_retention": (),
    "prompt_cache_options": (),
    "moderation": (),
}


def _as_list(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


class StreamOptions(RequestModel):
    include_usage: bool | None = None
    include_obfuscation: Annotated[Any, only(False)] = None


class SamplingFields(RequestModel):
    """Null is what was not given, as in OpenAI's own."""

    model: str = Field(max_length=256)
    temperature: Temperature | None = None
    top_p: Share | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    logit_bias: Annotated[dict[str, Bias], Field(max_length=MAX_LOGIT_BIASES)] | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    stop: Annotated[list[StopText], Field(max_length=4), BeforeValidator(_as_list)] | None = None
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: Annotated[str, Field(max_length=256)] | None = None
    """Goes into the usage log; turns in the queue are by API key."""

    top_k: Annotated[int, Field(ge=-1)] | None = None
    """Not OpenAI's, but vLLM's, like the rest below; 0 and -1 are all tokens."""

    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Field(ge=0.01, le=10)] | None = None
    stop_token_ids: Annotated[list[Annotated[int, Field(ge=0)]], Field(max_length=64)] | None = None
    ignore_eos: bool | None = None

    @model_validator(mode="after")
    def _options_of_a_stream(self) -> SamplingFields:
        if self.stream_options is not None and not self.stream:
            raise off("stream_options", "stream_options needs stream: true")
        for key in self.logit_bias or {}:
            if not (key.isascii() and key.isdecimal() and len(key) <= _MAX_DIGITS):
                shown = key if len(key) <= _MAX_DIGITS else f"{key[:_MAX_DIGITS]}..."
                raise off("logit_bias", f"logit_bias has {shown!r}, which is no token id")
        return self

    @property
    def include_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)

    def sampling(self, *, max_tokens: int | None, logprobs: int | None, **more: Any) -> SamplingParams:
        """The engine's parameters; what was not given is OpenAI's default."""
        given: dict[str, Any] = {
            "temperature": self.temperature,
            "top_p": self.top_p,
            "presence_penalty": self.presence_penalty,
            "frequency_penalty": self.frequency_penalty,
            "top_k": None if self.top_k is None else max(self.top_k, 0),
            "min_p": self.min_p,
            "repetition_penalty": self.repetition_penalty,
            "seed": self.seed,
            "ignore_eos": self.ignore_eos,
        }
        return SamplingParams(
            max_tokens=max_tokens,
            logprobs=logprobs,
            logit_bias={int(token): bias for token, bias in (self.logit_bias or {}).items()},
            stop=(*(self.stop or ()), *more.pop("also_stop", ())),
            stop_token_ids=tuple(self.stop_token_ids or ()),
            **{key: value for key, value in given.items() if value is not None},
            **more,
        )
