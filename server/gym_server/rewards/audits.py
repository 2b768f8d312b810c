"""Audits on the hub: draw the audited updates of a round, and record verdicts, which affect reputations."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from sqlalchemy import Connection, select

from gym_fed.config.hub.audit import AuditConfig
from gym_fed.config.hub.credits import PayTerms, ReputationConfig, RewardsConfig
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.core.json_files import canonical_digest
from gym_fed.core.text import counted
from gym_fed.soup.credit import Outcome, after
from gym_fed.trust.ledger.audits import DRAW_KIND, FAILED, VERDICT_KINDS, SignedVerdict, draw
from gym_fed.trust.ledger.entries import Entry
from gym_server.evaluations.seeds import seed_in
from gym_server.ledger.chain import Ledger
from gym_server.rewards.reputations import reputations_before
from gym_server.rounds.round_store import MERGING, latest_round
from gym_server.rounds.versions import newest_height
from gym_server.store.database import Database, rerun
from gym_server.store.tables import accounts, ledger, reputations, rounds, updates


def draw_audits(tx: Connection, record: Ledger) -> None:
    """Draw the updates and steps to audit from the round that ``tx`` commits, if its task has audits.

    The draw depends on the updates' ids and on the round's seed, which the ledger committed to at the start.
    """
    current = latest_round(tx)
    spec = None if current is None else current.spec
    if current is None or spec is None or spec.audit is None:
        return
    seed, terms, num_steps = seed_in(tx, spec.server_round), spec.audit, spec.recipe.max_steps
    record.append(
        tx,
        DRAW_KIND,
        {
            "server_round": spec.server_round,
            "seed": seed.hex(),
            "task": canonical_digest(spec.model_dump(mode="json")),
            "num_steps": num_steps,
            "terms": terms.model_dump(mode="json"),
            "updates": sorted(current.merging),
            "drawn": draw(seed, current.merging, num_steps, terms.rate, terms.steps),
        },
    )


class AuditVerdicts:
    """Records the verdicts of auditors.

    Args:
        database: The hub's database.
        record: The hub's ledger.
        server: Id of the hub.
        audit: The hub's audit settings; None if it has no audits.
        rewards: Reward settings for rounds whose task announced none.
        clock: The hub's clock, Unix seconds.
    """

    def __init__(
        self,
        database: Database,
        record: Ledger,
        server: str,
        audit: AuditConfig | None,
        rewards: RewardsConfig,
        clock: Callable[[], float],
    ) -> None:
        self._database, self._ledger, self._server = database, record, server
        self._audit, self._rewards, self._clock = audit, rewards, clock

    @rerun
    def record(self, signed: SignedVerdict) -> Entry:
        """Record a verdict; a failed audit lowers the contributor's reputation as proven cheating does.

        Raises:
            GymError: ``CONFIG_INVALID`` without ``rounds.audit``; ``PERMISSION_DENIED`` if the signer is not an
                auditor, or audits its own update; ``SIGNATURE_INVALID``; ``AUDIT_INVALID`` for a verdict that does not
                match the draw; ``REPLAYED`` if there is a verdict already; ``BUSY`` during a merge.
        """
        verdict = signed.verdict
        with self._database.transaction() as tx:
            self._check_auditor(tx, signed)
            current = latest_round(tx)
            if current is not None and current.state == MERGING:
                raise GymError(
                    ErrorCode.BUSY,
                    f"round {current.server_round} is being merged, which changes reputations",
                    "run the command again afterwards",
                )
            contributor = self._check_draw(tx, signed)
            body: dict[str, Any] = {
                "update": verdict.update,
                "contributor": contributor,
                "server_round": verdict.server_round,
                "signed": signed.model_dump(mode="json"),
            }
            if verdict.kind == FAILED:
                body |= self._lowered(tx, contributor, verdict.server_round)
            entry = self._ledger.append(tx, verdict.kind, body)
            self._ledger.sign_head(tx)
        return entry

    def _check_auditor(self, tx: Connection, signed: SignedVerdict) -> None:
        auditor = signed.verdict.auditor
        if self._audit is None:
            raise GymError(
                ErrorCode.CONFIG_INVALID, "this hub has no audits", "set rounds.audit in gym-server.yaml"
            )
        if auditor not in self._audit.auditors:
            raise GymError(
                ErrorCode.PERMISSION_DENIED,
                f"{auditor} is not an auditor of this hub",
                "list the account in rounds.audit.auditors",
            )
        row = tx.execute(select(accounts).where(accounts.c.contributor == auditor)).first()
        if row is None or row.status == "revoked" or row.public_key != bytes.fromhex(signed.public_key):
            raise GymError(
                ErrorCode.SIGNATURE_INVALID,
                f"the verdict is not signed by {auditor}'s key",
                "the auditor must sign it again with the account's key",
            )
        signed.verify()

    def _check_draw(self, tx: Connection, signed: SignedVerdict) -> str:
        """Check a verdict against the draw of its round; return the contributor of the update."""
        verdict = signed.verdict
        if verdict.server != self._server:
            raise _invalid(f"the verdict is for hub {verdict.server[:24]}, but this is {self._server}")
        body = next(
            (
                body
                for body in _bodies(tx, (DRAW_KIND,))
                if body["server_round"] == verdict.server_round and verdict.update in body["drawn"]
            ),
            None,
        )
        if body is None:
            raise _invalid(f"update {verdict.update[:12]} was not drawn in round {verdict.server_round}")
        if any(other["update"] == verdict.update for other in _bodies(tx, VERDICT_KINDS)):
            raise GymError(ErrorCode.REPLAYED, f"update {verdict.update[:12]} already has a verdict")
        steps, until = body["drawn"][verdict.update], body["at"] + body["terms"]["answer_seconds"]
        if verdict.tolerance != body["terms"]["tolerance"]:
            raise _invalid(f"its tolerance {verdict.tolerance:g} differs from the round's tolerance")
        if verdict.outcome == "unanswered" and self._clock() < until:
            raise _invalid(f"the contributor has {(until - self._clock()) / 3600:.1f} more hours to answer")
        if verdict.outcome == "passed" and sorted(map(int, verdict.distances)) != steps:
            raise _invalid(f"it passed without repeating all of the {counted(len(steps), 'drawn step')}")
        contributor = tx.scalar(select(updates.c.contributor).where(updates.c.update_id == verdict.update))
        if contributor == verdict.auditor:
            raise GymError(ErrorCode.PERMISSION_DENIED, "auditors cannot judge their own updates")
        return str(contributor)

    def _lowered(self, tx: Connection, contributor: str, server_round: int) -> dict[str, Any]:
        """Lower a reputation according to the audited round's terms; return the ledger fields that record it."""
        height, how = newest_height(tx), self._reputation_of(tx, server_round)
        value = reputations_before(tx, [contributor], height + 1, how)[contributor]
        lowered = after(value, Outcome.CHEATING, 0.0, 1.0, how.cheating)
        tx.execute(reputations.delete().where(reputations.c.contributor == contributor))
        tx.execute(reputations.insert().values(contributor=contributor, value=lowered, height=height))
        return {"reputations": {contributor: lowered}, "height": height}

    def _reputation_of(self, tx: Connection, server_round: int) -> ReputationConfig:
        """Return the reputation settings that a round's task announced."""
        spec = tx.scalar(select(rounds.c.spec).where(rounds.c.server_round == server_round))
        pay = json.loads(spec).get("pay") if spec else None
        return self._rewards.under(None if pay is None else PayTerms.model_validate(pay)).reputation


def _bodies(tx: Connection, kinds: tuple[str, ...]) -> list[dict[str, Any]]:
    texts = tx.scalars(select(ledger.c.body).where(ledger.c.kind.in_(kinds)).order_by(ledger.c.sequence))
    return [json.loads(text) for text in texts]


def _invalid(problem: str) -> GymError:
    return GymError(ErrorCode.AUDIT_INVALID, problem, "write it again with: gym-client audit check")
