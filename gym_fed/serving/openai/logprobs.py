"""Log-probabilities in OpenAI's two forms."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from gym_fed.serving.request import TokenLogprob

_MOST_NEGATIVE = -9999.0  # as OpenAI writes what has no chance; JSON has no infinity


def of_chat(tokens: Sequence[TokenLogprob]) -> dict[str, Any]:
    """``{"content": [{"token", "logprob", "bytes", "top_logprobs"}]}``."""
    content = [
        {
            **_one(told.text, told.logprob),
            "top_logprobs": [_one(text, logprob) for _, text, logprob in told.top],
        }
        for told in tokens
    ]
    return {"content": content, "refusal": None}


def of_completion(tokens: Sequence[TokenLogprob], offset: int) -> dict[str, Any]:
    """``{"tokens", "token_logprobs", "top_logprobs", "text_offset"}``; ``offset`` is where the first token begins."""
    offsets = []
    for told in tokens:
        offsets.append(offset)
        offset += len(told.text)
    return {
        "tokens": [told.text for told in tokens],
        "token_logprobs": [_finite(told.logprob) for told in tokens],
        "top_logprobs": [{text: _finite(value) for _, text, value in told.top} for told in tokens],
        "text_offset": offsets,
    }


def _one(text: str, logprob: float) -> dict[str, Any]:
    # A token that is a part of a character has no text of its own, and so no bytes here.
    return {"token": text, "logprob": _finite(logprob), "bytes": None if "�" in text else list(text.encode())}


def _finite(logprob: float) -> float:
    return max(logprob, _MOST_NEGATIVE)
