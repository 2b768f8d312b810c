"""The safety gate, which rolls back a soup that makes the model more likely to comply with harmful prompts.

The refusal margins of the parent version and of the soup are compared, prompt by prompt. Every outcome is recorded. The
gate needs neither a judge model nor generated text. It runs before the evaluations, which take longer.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sqlalchemy import Connection

from gym_fed.config.hub.sections import SafetyGateConfig
from gym_fed.config.hub.server import ServerConfig
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.core.text import counted
from gym_fed.evaluation.probe.margin import (
    MarginDrop,
    margin_drop,
    opening_requests,
    refusal_margins,
    verdict,
)
from gym_fed.evaluation.probe.prompts import ProbePrompts, own_prompts, read_prompts
from gym_server.ledger.chain import Ledger
from gym_server.rounds.hub_model import HubModel
from gym_server.rounds.soups import Soup

SAFETY = "safety-probed"
"""Kind of the gate's ledger entries."""
_ONLY = "base"


@dataclass(frozen=True)
class RoundSafety:
    """The gate's result for one round's soup.

    Attributes:
        ledger: Ledger that records the result.
        limits: The gate's config.
        server_round: Number of the round.
        parent: Digest of the version that the round starts from.
        soup: sha256 of the soup.
        prompts_sha256: sha256 of the prompts.
        drop: Drop of the refusal margin.
        reason: Reason for rolling the soup back; empty if it passes.
    """

    ledger: Ledger
    limits: SafetyGateConfig
    server_round: int
    parent: str
    soup: str
    version: str
    prompts_sha256: str
    drop: MarginDrop
    reason: str

    def write(self, outcome: str, tx: Connection, height: int | None = None) -> None:
        """Append the ledger entry; call it in the transaction that ends the round.

        Args:
            outcome: Outcome of the round.
            tx: The transaction.
            height: Height of the version that the round created.
        """
        body: dict[str, Any] = {
            "server_round": self.server_round,
            "outcome": outcome,
            "passed": not self.reason,
            "parent": self.parent,
            "soup": self.soup,
            "digest": self.version,
            "prompts_sha256": self.prompts_sha256,
            "num_prompts": self.drop.num_prompts,
            "before": self.drop.before,
            "after": self.drop.after,
            "drop": self.drop.drop,
            "lower": self.drop.lower,
            "max_margin_drop": self.limits.max_margin_drop,
            "confidence": self.limits.confidence,
        }
        self.ledger.append(tx, SAFETY, body if height is None else {**body, "height": height})

    def on_commit(self) -> Callable[[Connection, int], None]:
        """Return the callback for ``SoupRecord.also``."""
        return lambda tx, height: self.write("committed", tx, height)


def safety_of(
    config: ServerConfig,
    folder: Path,
    ledger: Ledger,
    model: HubModel,
    server_round: int,
    soup: Soup,
    version: str,
) -> RoundSafety | None:
    """Probe the parent version and the soup; return None if the config has no safety gate.

    Raises:
        GymError: ``MODEL_INVALID`` if the log-likelihoods are not finite with the soup.
    """
    limits = config.gate.safety
    if limits is None:
        return None
    prompts = gate_prompts(limits, folder)
    before = _margins(model, prompts)
    with model.applied(soup.path):
        after = _margins(model, prompts)
    drop = margin_drop(before, after, confidence=limits.confidence)
    why = verdict(drop, limits)
    return RoundSafety(
        ledger,
        limits,
        server_round,
        model.digest,
        soup.report.sha256,
        version,
        prompts.sha256,
        drop,
        f"rolled back: {why}" if why else "",
    )


def gate_prompts(config: SafetyGateConfig, folder: Path) -> ProbePrompts:
    """Return a gate's prompts, from its file or, by default, from the package.

    Args:
        config: The gate's config.
        folder: Folder against which a relative path is resolved.

    Raises:
        GymError: See ``read_prompts``.
    """
    return own_prompts() if config.prompts is None else read_prompts(folder / config.prompts)


def check_probable(config: SafetyGateConfig, folder: Path, model: HubModel) -> None:
    """Check that a gate can run on a model.

    Raises:
        GymError: ``DATA_INVALID`` for a base without a chat template; ``CONFIG_INVALID`` for a prompt longer than its
            context; errors from ``gate_prompts``; ``MODEL_INVALID`` if the serving engine cannot run the model.
    """
    prompts = gate_prompts(config, folder)
    longest = int(model.model.config.get_text_config().max_position_embeddings)
    requests = opening_requests(model.tokenizer, prompts)
    each = len(requests) // len(prompts.harmful)
    for place, (one, _) in enumerate(requests):
        length = len(one.context_ids) + len(one.continuation_ids)
        if length > longest:
            raise GymError(
                ErrorCode.CONFIG_INVALID,
                f"prompt {place // each + 1} has {counted(length, 'token')} with its opening; the model's "
                f"context is {longest}",
                "use shorter prompts",
            )
    first = ProbePrompts(prompts.harmful[:1], (), prompts.refusals, prompts.compliances, (), prompts.sha256)
    _margins(model, first)


def _margins(model: HubModel, prompts: ProbePrompts) -> tuple[float, ...]:
    """Return the refusal margins of a model with its current weights, without changing it."""
    from gym_fed.evaluation.scoring.local import LocalScorer
    from gym_fed.serving.forward.multi_variant import MultiVariantModel

    with MultiVariantModel(model.model) as served:
        return refusal_margins(LocalScorer(served, model.tokenizer, {_ONLY: None}), prompts)[_ONLY]
