"""The draws and verdicts of audits, read from a verified copy of the hub's ledger."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from gym_client.audits.evidence import kept_evidence
from gym_client.hub.transport import HubClient
from gym_client.identity.home import Home
from gym_client.ledger.copy import LedgerCopy
from gym_fed.config.hub.audit import AuditTerms
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.trust.ledger.audits import DRAW_KIND, VERDICT_KINDS, chance_of_catching
from gym_fed.trust.ledger.entries import Entry, corrupt
from gym_fed.trust.ledger.export import verify_file


@dataclass(frozen=True)
class Draw:
    """The steps of one update that are audited.

    Attributes:
        update: Id of the update.
        contributor: Id of its contributor.
        server_round: Round of the update.
        steps: Numbers of the drawn steps, from 1.
        num_steps: Number of training steps of the update.
        task: Digest of the round's task.
        terms: The terms of the audit.
        drawn_at: Time of the draw in Unix seconds, by the hub's clock.
        verdict: Kind of the ledger entry with the verdict; empty if there is none yet.
    """

    update: str
    contributor: str
    server_round: int
    steps: tuple[int, ...]
    num_steps: int
    task: str
    terms: AuditTerms
    drawn_at: int
    verdict: str = ""

    @property
    def chance(self) -> float:
        """The probability that the drawn steps contain the false one, if exactly one training step is false."""
        return chance_of_catching(self.num_steps, 1, len(self.steps))

    def to_dict(self) -> dict[str, Any]:
        """Convert to a JSON-compatible dictionary."""
        return {
            "update": self.update,
            "contributor": self.contributor,
            "server_round": self.server_round,
            "steps": list(self.steps),
            "chance_of_one_false_step": self.chance,
            "answer_until": self.drawn_at + self.terms.answer_seconds,
            "verdict": self.verdict,
        }


class Draws:
    """Ledger visitor that collects draws, and all updates that could have been drawn."""

    def __init__(self) -> None:
        self.drawn: dict[str, Draw] = {}
        self.considered: set[str] = set()
        self._contributors: dict[str, str] = {}

    def __call__(self, entry: Entry, body: dict[str, Any]) -> None:
        """Process the next entry."""
        if entry.kind == "verdict" and body.get("update"):
            self._contributors[body["update"]] = body["contributor"]
        elif entry.kind == DRAW_KIND:
            self.considered.update(body["updates"])
            try:
                self._add(body)
            except (KeyError, TypeError, ValueError) as error:
                raise corrupt(
                    f"entry {entry.sequence} ({entry.kind}): it is not a valid audit record: {error!r:.80}"
                ) from error
        elif entry.kind in VERDICT_KINDS:
            known = self.drawn[body["update"]]
            self.drawn[known.update] = Draw(**{**vars(known), "verdict": entry.kind})

    def _add(self, body: dict[str, Any]) -> None:
        for update, steps in body["drawn"].items():
            self.drawn[update] = Draw(
                update,
                self._contributors[update],
                int(body["server_round"]),
                tuple(steps),
                int(body["num_steps"]),
                str(body["task"]),
                AuditTerms.model_validate(body["terms"]),
                int(body["at"]),
            )

    def find(self, beginning: str) -> Draw:
        """Return the draw for an update, given the first characters of the update's id.

        Raises:
            GymError: ``NOT_FOUND`` if there is none; ``USAGE`` if there are several.
        """
        matches = [draw for update, draw in self.drawn.items() if update.startswith(beginning)]
        if not matches:
            raise GymError(
                ErrorCode.NOT_FOUND,
                f"no update whose id begins with {beginning[:64]!r} was drawn for an audit",
                "gym-client audit list shows the drawn updates",
            )
        if len(matches) > 1:
            raise GymError(
                ErrorCode.USAGE,
                f"the ids of {len(matches)} drawn updates begin with {beginning!r}",
                "pass more characters of the id",
            )
        return matches[0]


def read_draws(home: Home, client: HubClient) -> Draws:
    """Download and verify the hub's ledger, delete evidence of updates that were not drawn, and return the draws."""
    client.status()
    key = bytes.fromhex(client.pin.ledger_key)
    copy = LedgerCopy(home, key)
    copy.sync(client)
    draws = Draws()
    verify_file(copy.path, key, draws)
    drop_unneeded(home, client.pin.server, draws)
    return draws


def drop_unneeded(home: Home, server: str, draws: Draws) -> None:
    """Delete evidence that a hub no longer needs: of updates that were not drawn or already have a verdict."""
    for evidence in list(kept_evidence(home)):
        if evidence.task.server != server:
            continue
        draw = draws.drawn.get(evidence.update)
        if evidence.update in draws.considered and (draw is None or draw.verdict):
            evidence.drop()
