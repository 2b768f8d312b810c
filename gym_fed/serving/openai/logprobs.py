"""Log-probabilities in the forms of OpenAI's APIs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from gym_fed.serving.engine.request import TokenLogprob

_MIN_LOGPROB = -9999.0  # OpenAI's value for probability 0, since JSON has no infinity


def logprobs_of_chat(tokens: Sequence[TokenLogprob]) -> dict[str, Any]:
    """Format log-probabilities as ``{"content": [{"token", "logprob", "bytes", "top_logprobs"}]}``."""
    content = [
        {
            **_one(token.text, token.logprob),
            "top_logprobs": [_one(text, logprob) for _, text, logprob in token.top],
        }
        for token in tokens
    ]
    return {"content": content, "refusal": None}


def logprobs_of_completion(tokens: Sequence[TokenLogprob], offset: int) -> dict[str, Any]:
    """Format them as ``{"tokens", "token_logprobs", "top_logprobs", "text_offset"}``, beginning at ``offset``."""
    offsets = []
    for token in tokens:
        offsets.append(offset)
        offset += len(token.text)
    return {
        "tokens": [token.text for token in tokens],
        "token_logprobs": [_finite(token.logprob) for token in tokens],
        "top_logprobs": [{text: _finite(value) for _, text, value in token.top} for token in tokens],
        "text_offset": offsets,
    }


def _one(text: str, logprob: float) -> dict[str, Any]:
    # A token that is part of a character has no text of its own, and thus no bytes.
    return {"token": text, "logprob": _finite(logprob), "bytes": None if "�" in text else list(text.encode())}


def _finite(logprob: float) -> float:
    return max(logprob, _MIN_LOGPROB)
