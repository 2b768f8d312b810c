"""What to write instead of a request's unknown field."""

from __future__ import annotations

from collections.abc import Container

_LENGTH = ("max_tokens", "max_output_tokens")
_FORM = ("response_format", "text", "guided_json")
_CALLED = {
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
"""Equivalents of other servers' fields; the first one that the request's schema has is suggested."""
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
    """Return a hint on what to write instead of a field; empty if unknown.

    Args:
        field: The field in the request.
        known: The fields that the request may have.
    """
    called = next((name for name in _CALLED.get(field, ()) if name in known), "")
    return f"here it is called {called}" if called else _ALTERNATIVES.get(field, "")
