"""What is asked of the engine, and what comes back token by token. No torch: API and batch runner use it too."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

FinishReason = Literal["stop", "length", "cancelled", "error"]


@dataclass(frozen=True)
class SamplingParams:
    """How tokens are chosen, and when to stop. The defaults are OpenAI's.

    Attributes:
        max_tokens: Most tokens of the answer; None: as many as the context has left.
        temperature: 0 takes the likeliest token.
        top_p: Nucleus: the likeliest tokens that together have this share.
        top_k: The so many likeliest tokens; 0: all.
        min_p: Tokens at least so likely as this share of the likeliest one.
        presence_penalty: Taken off the logit of each token that the answer has already.
        frequency_penalty: Taken off for every time that the answer has it.
        repetition_penalty: Divides the logits of what prompt and answer have (Keskar et al. 2019); 1 is none.
        logit_bias: Added to the logits of these tokens.
        seed: Makes sampling repeatable whatever else is in the batch (of a float32 model; in bfloat16 the rounding
            of another batch size may change close calls); None: drawn anew.
        stop: The answer ends before the first of these texts.
        stop_token_ids: The answer ends at any of these, besides the model's own end tokens.
        ignore_eos: Do not end at the model's end tokens (for measurements).
        logprobs: None: none; n: of each chosen token, and of the n likeliest.
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
    """One answer that is wanted.

    Attributes:
        prompt_ids: At least one token.
        sampling: How it is to be written.
        variant: Name of a variant; None: the base.
        user: Whose turn it uses up: the queue is fair between users, not between requests.
        request_id: Names it in logs.
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
    """A piece of an answer: text that is safe to show (no half character, no half stop text), and its tokens.

    The last event has ``finish_reason``; its text may be empty.
    """

    text: str
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()
    finish_reason: FinishReason | None = None


@dataclass(frozen=True)
class Completion:
    """A whole answer.

    Attributes:
        text: Without end tokens and stop texts.
        token_ids: As chosen, the end token too.
        finish_reason: ``stop``, ``length`` or ``cancelled``.
        logprobs: One a token, where they were asked for.
        prompt_tokens: Length of the prompt.
        seconds_to_first_token: From submission.
        seconds: From submission to the end.
    """

    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    logprobs: tuple[TokenLogprob, ...]
    prompt_tokens: int
    seconds_to_first_token: float
    seconds: float

    @property
    def completion_tokens(self) -> int:
        return len(self.token_ids)
