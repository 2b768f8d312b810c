"""The safety gate: a soup after which the model would rather comply than before is rolled back.

The refusal margin of the version that the round starts from is compared with that of the soup, prompt by prompt. Both
outcomes are recorded. It needs no judge and no text, and runs before the evaluations, which take longer.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sqlalchemy import Connection

from gym_fed.config.hub.evaluations import SafetyGateConfig
from gym_fed.config.hub.lineage import next_digest
from gym_fed.config.hub.server import ServerConfig
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.evaluation.probe.gate import MarginDrop, margin_drop, verdict
from gym_fed.evaluation.probe.margin import opening_requests, refusal_margins
from gym_fed.evaluation.probe.prompts import ProbePrompts, own_prompts, read_prompts
from gym_server.ledger.chain import Ledger
from gym_server.rounds.hub_model import HubModel
from gym_server.rounds.soups import Soup

SAFETY = "safety-probed"
"""Kind of the ledger's entries."""
_ONLY = "base"


@dataclass(frozen=True)
class RoundSafety:
    """What the gate found of one round's soup.

    Attributes:
        ledger: Takes the entry.
        limits: The gate's config.
        server_round: The round.
        parent: Digest of the version that the round starts from.
        soup: sha256 of the soup.
        prompts_sha256: Of the prompts.
        drop: Of the margin.
        reason: Why the soup is rolled back; empty where it stays.
    """

    ledger: Ledger
    limits: SafetyGateConfig
    server_round: int
    parent: str
    soup: str
    prompts_sha256: str
    drop: MarginDrop
    reason: str

    def write(self, outcome: str, tx: Connection, height: int | None = None) -> None:
        """Append the entry; in the transaction that ends the round.

        Args:
            outcome: Of the round.
            tx: The transaction.
            height: Of the version that the round made.
        """
        body: dict[str, Any] = {
            "server_round": self.server_round,
            "outcome": outcome,
            "passed": not self.reason,
            "parent": self.parent,
            "soup": self.soup,
            "digest": next_digest(self.parent, self.soup, self.server_round),
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
        """For ``SoupRecord.also``."""
        return lambda tx, height: self.write("committed", tx, height)


def safety_of(
    config: ServerConfig, folder: Path, ledger: Ledger, model: HubModel, server_round: int, soup: Soup
) -> RoundSafety | None:
    """Probe the version and the soup; None without a safety gate.

    Raises:
        GymError: ``MODEL_INVALID`` for a soup under which log-likelihoods are not finite.
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
        prompts.sha256,
        drop,
        f"rolled back: {why}" if why else "",
    )


def gate_prompts(config: SafetyGateConfig, folder: Path) -> ProbePrompts:
    """The prompts of a gate: the package's, or those of a file.

    Args:
        config: Of the gate.
        folder: What its relative path starts from.

    Raises:
        GymError: As ``read_prompts``.
    """
    return own_prompts() if config.prompts is None else read_prompts(folder / config.prompts)


def check_probable(config: SafetyGateConfig, folder: Path, model: HubModel) -> None:
    """Refuse a gate that could not be run on a model.

    Raises:
        GymError: ``DATA_INVALID`` for a base without a chat template; ``CONFIG_INVALID`` for a prompt longer than its
            context; as ``gate_prompts``; ``MODEL_INVALID`` for a model that the serving engine cannot compute.
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
                f"prompt {place // each + 1} has {length} tokens with its opening; the model's context is {longest}",
                "give shorter prompts",
            )
    first = ProbePrompts(prompts.harmful[:1], (), prompts.refusals, prompts.compliances, (), prompts.sha256)
    _margins(model, first)


def _margins(model: HubModel, prompts: ProbePrompts) -> tuple[float, ...]:
    """Measure a model with its current weights; it is unchanged afterwards."""
    from gym_fed.evaluation.scoring.local import LocalScorer
    from gym_fed.serving.forward.multi_variant import MultiVariantModel

    with MultiVariantModel(model.model) as served:
        return refusal_margins(LocalScorer(served, model.tokenizer, {_ONLY: None}), prompts)[_ONLY]
