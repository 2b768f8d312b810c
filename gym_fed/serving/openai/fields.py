"""Parse requests strictly, and define the fields that chat and completions share.

Unknown fields, and known ones that this server does not support, are refused by name. A field of OpenAI's or vLLM's API
that has no effect on this server is accepted only with its neutral value.
"""

from __future__ import annotations

import json
from collections.abc import Container, Mapping
from typing import Annotated, Any, Self, TypeVar

from pydantic import BeforeValidator, ConfigDict, Field, ValidationError, model_validator
from pydantic_core import PydanticCustomError

from gym_fed.config.schema.base import StrictModel
from gym_fed.serving.engine.request import SamplingParams
from gym_fed.serving.openai.refusals import RequestError, unsupported_parameter


class RequestModel(StrictModel):
    """The base class of all request schemas: unknown fields are refused, and strings are not converted to numbers."""

    model_config = ConfigDict(strict=True)


Neutral = Mapping[str, tuple[Any, ...]]
"""Known but unsupported fields, each with its neutral values; None is always neutral."""

RequestT = TypeVar("RequestT", bound=RequestModel)


def parse(schema: type[RequestT], body: Any, neutral: Neutral) -> RequestT:
    """Validate a request.

    Raises:
        RequestError: With the first invalid field and the reason.
    """
    if not isinstance(body, dict):
        raise RequestError("the request must be a JSON object")
    values = {}
    for key, value in body.items():
        _require_text(key, value)
        if key not in neutral or key in schema.model_fields:
            values[key] = value
        elif value is not None and not any(_same(value, known) for known in neutral[key]):
            raise unsupported(key, neutral[key])
    try:
        return schema.model_validate(values)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        param = _param(first["loc"], values, missing=first["type"] == "missing")
        if (field := first.get("ctx", {}).get("field")) is not None:
            param = f"{param}.{field}" if param else field
        if first["type"] == "extra_forbidden":
            hint = hint_for(param, schema.model_fields)
            raise RequestError(
                f"unknown field {param!r}", param=param, name="unknown_parameter", hint=hint
            ) from error
        if first["type"] == "missing":
            raise RequestError(
                f"required field {param!r} is missing", param=param, name="missing_required_parameter"
            ) from error
        if first["type"] == "unsupported":
            raise unsupported_parameter(param, f"field {param!r}: {first['msg']}") from error
        raise RequestError(f"field {param!r}: {first['msg']}", param=param) from error


def off(field: str, message: str) -> PydanticCustomError:
    """Return an error for a validator of the whole request that names the field, which pydantic does not know."""
    return PydanticCustomError("off", "{said}", {"said": message, "field": field})


def only(*neutral: Any) -> BeforeValidator:
    """Return a validator that accepts only null and these values, for a known but unsupported nested field."""

    def check(value: Any) -> Any:
        if value is not None and not any(_same(value, known) for known in neutral):
            raise PydanticCustomError("unsupported", "it is not supported by this server")
        return value

    return BeforeValidator(check)


_PICTURES = ("image_url", "input_image")


def not_supported(name: str, kind: str, *supported: str) -> PydanticCustomError:
    """Return an error that names an unsupported ``type``."""
    remedy = ". Send images in messages with role user: as image_url in chat, as input_image in responses"
    return PydanticCustomError(
        "unsupported",
        "{what} of type {kind} are not supported by this server, only {supported}{remedy}",
        {
            "what": name,
            "kind": repr(kind[:80]),
            "supported": ", ".join(supported),
            "remedy": remedy if kind in _PICTURES else "",
        },
    )


def known_type(name: str, *supported: str) -> BeforeValidator:
    """Refuse unsupported values of ``type``, and name them; a value without a type is left to the schema."""

    def check(value: Any) -> Any:
        kind = value.get("type") if isinstance(value, dict) else None
        if isinstance(kind, str) and kind not in supported:
            raise not_supported(name, kind, *supported)
        return value

    return BeforeValidator(check)


def unsupported(field: str, neutral: tuple[Any, ...] = ()) -> RequestError:
    """Return the error for a field of OpenAI's API that this server does not support."""
    allowed = f"omit it, or send {' or '.join(map(repr, neutral))}" if neutral else "omit it"
    return unsupported_parameter(field, f"field {field!r} is not supported by this server", allowed)


def _require_text(key: str, value: Any) -> None:
    """Refuse lone surrogates, which JSON can write as ``\\ud800`` but no tokenizer can encode."""
    try:
        json.dumps([key, value], ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        shown = key.encode(errors="replace").decode()
        raise RequestError(
            f"field {shown!r} has an incomplete character (a lone surrogate)", param=shown
        ) from error


def _same(value: Any, known: Any) -> bool:
    """Return True if value and type are equal: 1 is not True."""
    return type(value) is type(known) and bool(value == known)


def _param(loc: tuple[int | str, ...], body: Any, *, missing: bool) -> str:
    """Format pydantic's location as ``messages[0].content``, without the names of union members.

    For a missing field, the last part of the location is the field's name, which is not in the body.
    """
    for end in range(len(loc), 0, -1):  # the last part may be the name of a union member
        if (path := _path(loc[:end], body, missing=missing and end == len(loc))) is not None:
            return path.removeprefix(".")
    return ""


def _path(loc: tuple[int | str, ...], value: Any, *, missing: bool) -> str | None:
    """Return the path to the last part of ``loc``; None if it does not lead into ``value``.

    A part of ``loc`` may be a union member's name instead of a key. It is a key if the rest of the path is below it.
    """
    if not loc:
        return ""
    key, rest = loc[0], loc[1:]
    path = None
    if isinstance(value, dict) and isinstance(key, str) and (key in value or (missing and not rest)):
        path, step = _path(rest, value.get(key), missing=missing), f".{key}"
    elif isinstance(value, list) and isinstance(key, int) and key < len(value):
        path, step = _path(rest, value[key], missing=missing), f"[{key}]"
    if path is not None:
        return f"{step}{path}"
    return _path(rest, value, missing=missing) if rest else None


MAX_LOGIT_BIASES = 1024
_MAX_DIGITS = 12

Temperature = Annotated[float, Field(ge=0, le=2)]
Share = Annotated[float, Field(gt=0, le=1)]
Penalty = Annotated[float, Field(ge=-2, le=2)]
StopText = Annotated[str, Field(min_length=1, max_length=256)]
Bias = Annotated[float, Field(ge=-100, le=100)]

Metadata = Annotated[
    dict[Annotated[str, Field(max_length=64)], Annotated[str, Field(max_length=512)]], Field(max_length=16)
]
TemplateVariables = Annotated[
    dict[
        Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]{0,63}$")],
        bool
        | Annotated[int, Field(ge=-(2**31), lt=2**31)]
        | float
        | Annotated[str, Field(max_length=256)]
        | None,
    ],
    Field(max_length=16),
]
"""Variables of a chat template in addition to messages and tools."""

Identifier = Annotated[str, Field(min_length=1, max_length=256)]

NEUTRAL: Neutral = {
    "service_tier": ("auto", "default"),
    "prompt_cache_retention": (),
    "prompt_cache_options": (),
    "moderation": (),
    "use_beam_search": (False,),
    "spaces_between_special_tokens": (True,),
    "include_stop_str_in_output": (False,),
    "return_token_ids": (False,),
    "logits_processors": (),
    "kv_transfer_params": (),
    "vllm_xargs": (),
}


def _as_list(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


class SamplingFields(RequestModel):
    """The sampling fields; null means not given, as in OpenAI's API."""

    model: str = Field(max_length=256)
    temperature: Temperature | None = None
    top_p: Share | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    logit_bias: Annotated[dict[str, Bias], Field(max_length=MAX_LOGIT_BIASES)] | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    stop: Annotated[list[StopText], Field(max_length=4), BeforeValidator(_as_list)] | None = None
    stream: bool | None = None
    user: Annotated[str, Field(max_length=256)] | None = None
    """Written to the usage log, like the next two fields; the queue schedules fairly between API keys."""

    safety_identifier: Identifier | None = None
    metadata: Metadata | None = None
    """Also returned with the answer."""

    prompt_cache_key: Identifier | None = None
    """Prompts share KV blocks only with prompts that have the same key."""

    cache_salt: Identifier | None = None
    """vLLM's name for ``prompt_cache_key``."""

    top_k: Annotated[int, Field(ge=-1)] | None = None
    """A field of vLLM, like all fields below; 0 and -1 mean all tokens."""

    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Field(ge=0.01, le=10)] | None = None
    stop_token_ids: Annotated[list[Annotated[int, Field(ge=0)]], Field(max_length=64)] | None = None
    ignore_eos: bool | None = None
    min_tokens: Annotated[int, Field(ge=0)] | None = None
    skip_special_tokens: bool | None = None
    """False includes control tokens in the answer's text, except the one that ends it."""

    @model_validator(mode="after")
    def _validate_logit_bias(self) -> SamplingFields:
        for key in self.logit_bias or {}:
            if not (key.isascii() and key.isdecimal() and len(key) <= _MAX_DIGITS):
                shown = key if len(key) <= _MAX_DIGITS else f"{key[:_MAX_DIGITS]}..."
                raise off("logit_bias", f"logit_bias has {shown!r}, which is not a token id")
        return self

    @model_validator(mode="after")
    def _validate_cache_keys(self) -> SamplingFields:
        if None not in (self.prompt_cache_key, self.cache_salt) and self.prompt_cache_key != self.cache_salt:
            raise off("cache_salt", "cache_salt and prompt_cache_key differ")
        return self

    def filled(self, defaults: Mapping[str, Any]) -> Self:
        """Return a copy with ``defaults`` for fields that were not given."""
        missing = {name: value for name, value in defaults.items() if getattr(self, name) is None}
        return self.model_copy(update=missing)

    @property
    def cache_key(self) -> str:
        """The ``prompt_cache_key``, or ``cache_salt``; empty if neither is given."""
        return self.prompt_cache_key or self.cache_salt or ""

    def sampling(self, *, max_tokens: int | None, logprobs: int | None, **more: Any) -> SamplingParams:
        """Convert to the engine's parameters; fields that were not given have OpenAI's defaults.

        Raises:
            RequestError: For an impossible ``min_tokens``.
        """
        if self.min_tokens and max_tokens is not None and self.min_tokens > max_tokens:
            raise RequestError(
                f"field 'min_tokens': {self.min_tokens} exceeds the answer's limit of {max_tokens}",
                param="min_tokens",
            )
        if self.min_tokens and (more.get("json_schema") is not None or more.get("grammar") is not None):
            raise RequestError(
                "field 'min_tokens': a schema or a grammar determines where the answer ends",
                param="min_tokens",
                hint="send only one of them",
            )
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
            "min_tokens": self.min_tokens,
            "skip_special_tokens": self.skip_special_tokens,
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


class PromptEndFields(RequestModel):
    """Fields of vLLM for the end of a chat's prompt."""

    add_generation_prompt: bool | None = None
    """False omits the text that begins the assistant's answer."""

    continue_final_message: bool | None = None
    """True leaves the last message open, so that the answer continues it; it needs no generation prompt."""

    @model_validator(mode="after")
    def _validate_prompt_end(self) -> Self:
        if self.add_generation_prompt and self.continue_final_message:
            raise off(
                "continue_final_message",
                "continue_final_message and add_generation_prompt cannot both be true",
            )
        return self

    @property
    def prompt_end(self) -> dict[str, bool]:
        """The two arguments of ``apply_chat_template``."""
        continues = bool(self.continue_final_message)
        begins = not continues if self.add_generation_prompt is None else self.add_generation_prompt
        return {"add_generation_prompt": begins, "continue_final_message": continues}


_LENGTH = ("max_tokens", "max_output_tokens")
_FORM = ("response_format", "text", "guided_json")
_EQUIVALENTS = {
    "repeat_penalty": ("repetition_penalty",),
    **dict.fromkeys(("n_predict", "num_predict", "max_new_tokens"), _LENGTH),
    **dict.fromkeys(("max_tokens", "max_completion_tokens", "max_output_tokens"), _LENGTH),
    "grammar": ("guided_grammar",),
    "regex": ("guided_regex",),
    **dict.fromkeys(("json_schema", "format"), _FORM),
    "think": ("reasoning_effort", "reasoning"),
    "n_probs": ("top_logprobs", "logprobs"),
    "reasoning_effort": ("reasoning",),
}
"""Our names for other servers' fields; the first one that the request's schema has is suggested."""
_ALTERNATIVES = {
    "cache_prompt": "omit it: the server caches prefixes (engine.prefix_cache)",
    "keep_alive": "omit it: the model stays in memory as long as the server runs",
    "options": "its keys are top-level fields of the request: temperature, top_p, seed, stop, max_tokens",
    "num_ctx": "omit it: the server sets the context (engine.max_context)",
    **dict.fromkeys(
        (
            "thinking_token_budget",
            "thinking_budget",
            "include_reasoning",
            "reasoning_effort",
            "chat_template_kwargs",
            "add_generation_prompt",
            "continue_final_message",
        ),
        "it needs the chat template: send messages to /v1/chat/completions",
    ),
}


def hint_for(field: str, known: Container[str]) -> str:
    """Return a suggestion for an unknown field, given the known ones; empty if there is no equivalent."""
    name = next((name for name in _EQUIVALENTS.get(field, ()) if name in known), "")
    return f"use {name}" if name else _ALTERNATIVES.get(field, "")
