"""Build requests to vLLM's ``/v1/completions`` and read the chunks of its answers, both as token ids."""

from __future__ import annotations

import hashlib
import hmac
import json
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.serving.engine.request import Grammar, SamplingParams
from gym_fed.serving.engine.sampling import SampledLogprob

_GREEDY_BELOW = 1e-4
_LEAST_TEMPERATURE = 0.01
_MAX_TEMPERATURE = 2.0
_MAX_BIAS = 100.0
_LEAST_TOP_P = 1e-6
_TOKEN = "token_id:"


def require_supported(params: SamplingParams) -> None:
    """Refuse parameters that vLLM does not support, or would silently change.

    Raises:
        GymError: ``USAGE`` naming the first one.
    """
    if _GREEDY_BELOW <= params.temperature < _LEAST_TEMPERATURE or params.temperature > _MAX_TEMPERATURE:
        allowed = f"0 or between {_LEAST_TEMPERATURE} and {_MAX_TEMPERATURE:g}"
        raise _refused(f"temperature {params.temperature:g} instead of {allowed} is not supported")
    if any(abs(bias) > _MAX_BIAS for bias in params.logit_bias.values()):
        raise _refused(f"a logit_bias outside -{_MAX_BIAS:g} to {_MAX_BIAS:g} is not supported")
    thinking = params.thinking
    if thinking is not None and thinking.budget is not None:
        raise _refused("thinking_token_budget is not supported")
    if thinking is not None and params.held_to is not None:
        raise _refused("a schema, grammar or required tool cannot follow a thought")
    if params.held_to is not None and params.held_to.kind == "calls":
        raise _refused("strict tools and tool_choice: required are not supported")


def _refused(message: str) -> GymError:
    return GymError(ErrorCode.USAGE, f"{message} with engine: vllm", "change the request, or use engine: own")


@dataclass(frozen=True)
class CacheSalts:
    """Salts of vLLM's prefix cache, which separate users: only requests with the same salt share KV blocks.

    Attributes:
        key: A random secret of this server, so that no salt can be guessed.
        sharing: ``engine.prefix_cache``: per user, across users (``shared``), or False for a new salt per request.
    """

    key: bytes
    sharing: bool | str

    def salt(self, user: str, key_digest: str, variant: str | None, cache_key: str) -> str:
        """Return the salt of a request."""
        if not self.sharing:
            return secrets.token_hex(32)
        owner = [] if self.sharing == "shared" else [user, key_digest]
        text = json.dumps([owner, variant, cache_key]).encode()
        return hmac.new(self.key, text, hashlib.sha256).hexdigest()


def completion_body(
    model: str,
    prompt_ids: list[int],
    params: SamplingParams,
    *,
    max_tokens: int,
    end_ids: frozenset[int],
    salt: str,
    stream: bool = True,
) -> dict[str, Any]:
    """Return the body of a request.

    The model's end tokens are passed as ``stop_token_ids``, so that vLLM ends an answer where ``engine: own`` would.
    The gateway itself looks for ``stop`` texts, and then closes the stream.

    Args:
        model: A digest, or the name of the base.
        prompt_ids: The prompt.
        params: Parameters that ``require_supported`` accepts.
        max_tokens: Maximum number of tokens of the answer.
        end_ids: Tokens that end it.
        salt: The salt of the prefix cache.
        stream: True for events as tokens arrive; False for one object at the end.
    """
    body: dict[str, Any] = {
        "model": model,
        "prompt": prompt_ids,
        "stream": stream,
        "return_token_ids": True,
        "max_tokens": max_tokens,
        "min_tokens": params.min_tokens,
        "temperature": 0.0 if params.temperature < _GREEDY_BELOW else params.temperature,
        "top_p": max(params.top_p, _LEAST_TOP_P),
        "top_k": params.top_k,
        "min_p": params.min_p,
        "presence_penalty": params.presence_penalty,
        "frequency_penalty": params.frequency_penalty,
        "repetition_penalty": params.repetition_penalty,
        "ignore_eos": True,
        "stop_token_ids": sorted(end_ids),
        "skip_special_tokens": False,
        "cache_salt": salt,
    }
    if stream:
        body["stream_options"] = {"include_usage": True}
    if params.seed is not None:
        body["seed"] = params.seed % 2**63
    if params.logit_bias:
        body["logit_bias"] = {str(token): bias for token, bias in params.logit_bias.items()}
    if params.logprobs is not None:
        body |= {"logprobs": params.logprobs, "return_tokens_as_token_ids": True}
    if params.held_to is not None:
        body["structured_outputs"] = {"grammar": lark_of(params.held_to)}
    return body


def lark_of(grammar: Grammar) -> str:
    """Translate a grammar to Lark's notation, which vLLM passes to llguidance unchanged.

    Raises:
        GymError: See ``guided.compiled``.
    """
    from gym_fed.serving.engine.guided import compiled

    text = compiled(grammar)
    if not text.startswith("{"):
        return text
    first = json.loads(text)["grammars"][0]
    return first["lark_grammar"] or f"start: %json {json.dumps(first['json_schema'])}\n"


@dataclass(frozen=True)
class AnswerChunk:
    """A part of an answer.

    Attributes:
        token_ids: The new tokens.
        logprobs: One per token, if requested.
        finish_reason: ``stop`` or ``length`` at the end; None before.
        cached_tokens: Number of tokens of the prompt that were in the prefix cache; None if not reported.
    """

    token_ids: tuple[int, ...] = ()
    logprobs: tuple[SampledLogprob, ...] = ()
    finish_reason: str | None = None
    cached_tokens: int | None = None


def read_chunk(value: Mapping[str, Any]) -> AnswerChunk:
    """Read an event of a stream, or the object of an answer without streaming.

    Raises:
        GymError: ``UNAVAILABLE`` for an error in the stream.
        KeyError: For an unknown format, as are ``ValueError`` and ``TypeError``.
    """
    if "error" in value:
        raise GymError(
            ErrorCode.UNAVAILABLE,
            f"vLLM failed during the answer: {str(value['error'].get('message'))[:300]}",
            "try again",
        )
    cached = None
    if (usage := value.get("usage")) is not None:
        cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens")
    if not value["choices"]:
        return AnswerChunk(cached_tokens=cached)
    choice = value["choices"][0]
    ids = tuple(int(token) for token in choice.get("token_ids") or ())
    logprobs = () if choice.get("logprobs") is None else _logprobs(choice["logprobs"])
    return AnswerChunk(ids, logprobs, choice.get("finish_reason"), cached)


def _logprobs(logprobs: Mapping[str, Any]) -> tuple[SampledLogprob, ...]:
    return tuple(
        SampledLogprob(float(value), _likeliest(top or {}))
        for value, top in zip(logprobs["token_logprobs"], logprobs["top_logprobs"], strict=True)
    )


def _likeliest(top: Mapping[str, float]) -> tuple[tuple[int, float], ...]:
    """Return tokens and log-probabilities, most likely first."""
    pairs = [(int(name.removeprefix(_TOKEN)), float(value)) for name, value in top.items()]
    return tuple(sorted(pairs, key=lambda pair: -pair[1]))
