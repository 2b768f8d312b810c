"""`gate.safety`: how far a soup may lower the refusal margin."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from gym_fed.config.schema.base import StrictModel


class SafetyGateConfig(StrictModel):
    """The safety probe as a gate: a soup after which the model refuses less is rolled back."""

    max_margin_drop: Annotated[float, Field(ge=0)]
    """In nats per token: a soup that lowers the refusal margin by more, at ``confidence``, is rolled back."""

    confidence: Annotated[float, Field(ge=0.5, lt=1)] = 0.95
    """Limit of the drop's lower bound, paired by prompt."""

    prompts: str | None = None
    """A CSV or JSONL file of requests to refuse, relative to the hub's folder; absent: those of the package."""
