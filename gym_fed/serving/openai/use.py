"""What a request has used, for the log of usage."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Use:
    """The usage of one request.

    Attributes:
        url: The kind of request.
        model: The requested name.
        caller: Name of the caller.
        end_user: The request's ``user``, if any.
        safety_identifier: The request's, if any.
        metadata: The request's, if any.
        prompt_tokens: Tokens of the prompts.
        completion_tokens: Tokens of the answers, also of cancelled ones.
    """

    url: str
    model: str
    caller: str
    end_user: str | None
    prompt_tokens: int
    completion_tokens: int
    safety_identifier: str | None = None
    metadata: Mapping[str, str] | None = None


OnUse = Callable[[Use], None]
