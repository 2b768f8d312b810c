"""Requests to the engine, their events and results, and the limits that are checked at submission.

No torch: API and batch runner use it too.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from gym_fed.errors import ErrorCode, GymError

FinishReason = Literal["stop", "length", "cancelled", "error"]


@dataclass(frozen=True)
class SamplingParams:
    """How tokens are sampled, and when to stop. The defaults are OpenAI's.

    Attributes:
        max_tokens: Most tokens of the answer; None: as many as the context has left.
        temperature: 0 takes the likeliest token.
        top_p: Nucleus sampling: the likeliest tokens that together have this probability.
        top_k: Sample among this many likeliest tokens; 0: all.
        min_p: Sample among tokens at least this fraction as likely as the likeliest one.
        presence_penalty: Subtracted from the logit of each token that the answer has already.
        frequency_penalty: Subtracted once for every time that the answer has the token.
        repetition_penalty: Divides the logits of tokens in prompt and answer (Keskar et al. 2019); 1 is none.
        logit_bias: Added to the logits of these tokens.
        seed: Makes sampling repeatable whatever else is in the batch. (Of a float32 model; in bfloat16 the rounding
            of another batch size may change close calls.) None: random.
        stop: The answer ends before the first of these texts.
        stop_token_ids: The answer ends at any of these, besides the model's own end tokens.
        ignore_eos: Do not end at the model's end tokens (for measurements).
        logprobs: None: none; n: of each sampled token, and of the n likeliest.
        json_schema: The answer is a JSON value that this schema (as JSON text) allows; ``{}`` allows any object.
    """

    max_tokens: int | None = None
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    json_schema: str | None = None


@dataclass(frozen=True)
class GenerationRequest:
    """A request for one answer.

    Attributes:
        prompt_ids: At least one token.
        sampling: How its tokens are sampled.
        variant: Name of a variant; None: the base.
        user: To whom its tokens are charged: the queue is fair between users, not between requests.
        request_id: Its name in logs.
    """

    prompt_ids: list[int]
    sampling: SamplingParams = field(default_factory=SamplingParams)
    variant: str | None = None
    user: str = ""
    request_id: str = field(default_factory=lambda: secrets.token_hex(8))


@dataclass(frozen=True)
class TokenLogprob:
    """One token and its natural-log probability before temperature and penalties."""

    token_id: int
    text: str
    logprob: float
    top: tuple[tuple[int, str, float], ...] = ()
    """The likeliest tokens of the same place, likeliest first: id, text, logprob."""


@dataclass(frozen=True)
class Event:
    """A part of an answer: text that is safe to show (no half character, no half stop text), and its tokens.

    The last event has ``finish_reason``; its text may be empty.
    """

    text: str
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()
    finish_reason: FinishReason | None = None


@dataclass(frozen=True)
class CompletionOutput:
    """A whole answer.

    Attributes:
        text: Without end tokens and stop texts.
        token_ids: As chosen, the end token too.
        finish_reason: ``stop``, ``length`` or ``cancelled``.
        logprobs: One per token, where they were requested.
        prompt_tokens: Length of the prompt.
        seconds_to_first_token: From submission.
        seconds: From submission to the end.
        cached_tokens: Tokens of the prompt whose keys and values were there from an earlier request.
    """

    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    logprobs: tuple[TokenLogprob, ...]
    prompt_tokens: int
    seconds_to_first_token: float
    seconds: float
    cached_tokens: int = 0

    @property
    def completion_tokens(self) -> int:
        return len(self.token_ids)


MAX_LOGPROBS = 20


@dataclass(frozen=True)
class Limits:
    """What a model and its engine allow a request.

    Attributes:
        context: Most tokens of prompt and answer together.
        vocab_size: Width of the logits.
        kv_bytes_per_token: Bytes of one token in the KV cache.
        kv_bytes: Of all blocks of the KV cache.
    """

    context: int
    vocab_size: int
    kv_bytes_per_token: int
    kv_bytes: int

    def check_prompt(self, ids: list[int]) -> None:
        """Raises:
        GymError: ``USAGE`` for no tokens or unknown ones, ``TOO_LARGE`` where no token of an answer would fit.
        """
        if not ids:
            raise GymError(ErrorCode.USAGE, "the prompt is empty", "give at least one token")
        if not 0 <= min(ids) <= max(ids) < self.vocab_size:
            off = next(token_id for token_id in ids if not 0 <= token_id < self.vocab_size)
            raise GymError(
                ErrorCode.USAGE, f"the prompt has token {off}; the model has 0 to {self.vocab_size - 1}"
            )
        if len(ids) >= self.context:
            raise GymError(
                ErrorCode.TOO_LARGE,
                f"the prompt has {len(ids)} tokens; the context has {self.context}, for the answer too",
                "shorten the prompt",
            )

    def answer_tokens(self, request: GenerationRequest) -> int:
        """Most tokens of this answer: ``max_tokens``, or what context and KV cache have left.

        Raises:
            GymError: ``TOO_LARGE`` where prompt and answer need more KV cache than there is.
        """
        left = self.context - len(request.prompt_ids)
        wanted = request.sampling.max_tokens
        if wanted is None:
            wanted = max(1, self.kv_bytes // self.kv_bytes_per_token - len(request.prompt_ids))
        tokens = min(wanted, left)
        self.check_kv_cache(len(request.prompt_ids), tokens)
        return tokens

    def check_kv_cache(self, prompt: int, answer: int) -> None:
        """Raises:
        GymError: ``TOO_LARGE`` where that is more KV cache than there is.
        """
        need = (prompt + answer) * self.kv_bytes_per_token
        if need > self.kv_bytes:
            also = f" and an answer of {answer}" if answer else ""
            raise GymError(
                ErrorCode.TOO_LARGE,
                f"a prompt of {prompt} tokens{also} may need {need:,} bytes of KV cache; kv_cache_size has room "
                f"for {self.kv_bytes:,}",
                "ask for fewer max_tokens, or raise kv_cache_size" if answer else "shorten it",
            )

    def check_sampling(self, params: SamplingParams) -> None:
        """Raises:
        GymError: ``USAGE`` naming the first invalid parameter.
        """
        known = params.logit_bias
        rules: tuple[tuple[str, Any, bool, str], ...] = (
            (
                "max_tokens",
                params.max_tokens,
                params.max_tokens is None or params.max_tokens >= 1,
                "at least 1",
            ),
            ("temperature", params.temperature, _in(params.temperature, 0, 100), "from 0 to 100"),
            ("top_p", params.top_p, _in(params.top_p, 0, 1), "from 0 to 1"),
            ("top_k", params.top_k, params.top_k >= 0, "0 (all) or more"),
            ("min_p", params.min_p, _in(params.min_p, 0, 1), "from 0 to 1"),
            (
                "presence_penalty",
                params.presence_penalty,
                _in(params.presence_penalty, -100, 100),
                "-100 to 100",
            ),
            (
                "frequency_penalty",
                params.frequency_penalty,
                _in(params.frequency_penalty, -100, 100),
                "-100 to 100",
            ),
            (
                "repetition_penalty",
                params.repetition_penalty,
                _in(params.repetition_penalty, 0.01, 100),
                "from 0.01 to 100",
            ),
            (
                "logit_bias",
                "a token",
                all(0 <= i < self.vocab_size for i in known),
                f"below {self.vocab_size}",
            ),
            ("logit_bias", "a bias", all(_in(v, -1000, 1000) for v in known.values()), "from -1000 to 1000"),
            ("stop", params.stop, all(params.stop), "texts of at least one character"),
            (
                "stop_token_ids",
                params.stop_token_ids,
                all(_whole(i) and 0 <= i < self.vocab_size for i in params.stop_token_ids),
                f"tokens from 0 to {self.vocab_size - 1}",
            ),
            ("seed", params.seed, params.seed is None or _whole(params.seed), "a whole number"),
            (
                "logprobs",
                params.logprobs,
                params.logprobs is None or 0 <= params.logprobs <= MAX_LOGPROBS,
                f"from 0 to {MAX_LOGPROBS}",
            ),
        )
        for name, value, holds, allowed in rules:
            if not holds:
                raise GymError(ErrorCode.USAGE, f"{name}: {value!r} is not {allowed}")
        if params.json_schema is not None and (params.stop or params.stop_token_ids):
            raise GymError(
                ErrorCode.USAGE,
                "stop and json_schema cannot be used together: a value that is cut short is not JSON",
                "leave one of them out",
            )


def _in(value: float, low: float, high: float) -> bool:
    return math.isfinite(value) and low <= value <= high


def _whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
