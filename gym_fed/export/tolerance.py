"""How far what was read back may be from what should have been, and what is refused beyond it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Tolerance:
    """Limits of a comparison; None limits nothing.

    Attributes:
        max: Of the largest distance of two logits, as a share of the largest logit.
        kl: Of the mean Kullback-Leibler divergence over positions, in nats.
        top1: Least share of positions with the same likeliest token.
        greedy: Whether the greedy tokens must be the same.
    """

    max: float | None = 1e-5
    kl: float | None = None
    top1: float | None = None
    greedy: bool = True

    def problem(self, figures: Mapping[str, Any]) -> str | None:
        """Why figures of ``compared`` are beyond the limits, or None."""
        if not figures["same_token_ids"]:
            return "other token ids for the same texts"
        if not figures.get("same_special_tokens", True):
            return "other special tokens"
        if not figures.get("same_chat_template", True):
            return "another chat template"
        if self.max is not None and not figures["max"] <= self.max * figures["largest"]:
            return f"logits that are up to {figures['max']:.3g} off, of at most {figures['largest']:.3g}"
        if self.kl is not None and not figures["kl"] <= self.kl:
            return f"probabilities that are {figures['kl']:.3g} nats off, {self.kl:g} are allowed"
        if self.top1 is not None and not figures["top1"] >= self.top1:
            return (
                f"the same likeliest token at {figures['top1']:.1%} of positions, {self.top1:.0%} are needed"
            )
        if self.greedy and not figures["same_greedy_tokens"]:
            return "another answer to the same prompt"
        return None
