"""OpenAI's HTTP API without HTTP: requests as dicts in, answers and stream chunks as dicts out.

``gym api`` puts a server before it, ``gym batch`` feeds it lines of a file. Names are imported on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from gym_fed.lazy import lazy

if TYPE_CHECKING:
    from gym_fed.serving.openai.access import LOCAL, Caller
    from gym_fed.serving.openai.refusals import RequestError, error_body
    from gym_fed.serving.openai.service import OpenAIService

__all__ = ["LOCAL", "Caller", "OpenAIService", "RequestError", "error_body"]

__getattr__ = lazy(
    __name__,
    LOCAL="gym_fed.serving.openai.access",
    Caller="gym_fed.serving.openai.access",
    OpenAIService="gym_fed.serving.openai.service",
    RequestError="gym_fed.serving.openai.refusals",
    error_body="gym_fed.serving.openai.refusals",
)
