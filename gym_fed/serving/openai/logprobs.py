"""Format log-probabilities as OpenAI's APIs do.

A token that is only part of a character is written as in OpenAI's APIs: ``\\xf0\\x9f`` in chat and responses, and
``bytes:\\xf0\\x9f`` in completions.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from gym_fed.serving.engine.request import TokenLogprob

_MIN_LOGPROB = -9999.0  # OpenAI's value for probability 0, since JSON has no infinity


def logprobs_of_chat(tokens: Sequence[TokenLogprob]) -> dict[str, Any]:
    """Format log-probabilities as ``{"content": [{"token", "logprob", "bytes", "top_logprobs"}]}``."""
    content = [
        {
            **_chat_entry(token.data, token.logprob),
            "top_logprobs": [_chat_entry(data, logprob) for _, data, logprob in token.top],
        }
        for token in tokens
    ]
    return {"content": content, "refusal": None}


def logprobs_of_completion(tokens: Sequence[TokenLogprob]) -> dict[str, Any]:
    """Format log-probabilities as ``{"tokens", "token_logprobs", "top_logprobs", "text_offset"}`` (in characters)."""
    return {
        "tokens": [_text(token.data, "bytes:") for token in tokens],
        "token_logprobs": [_finite(token.logprob) for token in tokens],
        "top_logprobs": [_by_text(token) for token in tokens],
        "text_offset": [token.start for token in tokens],
    }


def _by_text(token: TokenLogprob) -> dict[str, float]:
    """Return the most likely tokens and the sampled one by text, as OpenAI and vLLM do.

    A token with the same text as the sampled token, or as a more likely one, is named ``token_id:ID``, as in vLLM.
    """
    entries = list(token.top)
    if all(token_id != token.token_id for token_id, *_ in entries):
        entries.append((token.token_id, token.data, token.logprob))
    own, by_text = _text(token.data, "bytes:"), dict[str, float]()
    for token_id, data, logprob in entries:
        text = _text(data, "bytes:")
        is_taken = text in by_text or (text == own and token_id != token.token_id)
        by_text[f"token_id:{token_id}" if is_taken else text] = _finite(logprob)
    return by_text


def _chat_entry(data: bytes, logprob: float) -> dict[str, Any]:
    return {"token": _text(data), "logprob": _finite(logprob), "bytes": list(data)}


def _text(data: bytes, prefix: str = "") -> str:
    try:
        return data.decode()
    except UnicodeDecodeError:
        return prefix + "".join(f"\\x{byte:02x}" for byte in data)


def _finite(logprob: float) -> float:
    return max(logprob, _MIN_LOGPROB)
