"""Audits in the ledger: the leaves that an update commits to, the draw of steps, and signed verdicts.

A contributor commits to a training run with ``training_root`` in the update's manifest: the Merkle root of one leaf for
the state before training and one for the state after each step. When the round ends, an ``audit-draw`` entry reveals
the round's seed, to which an ``evaluation-seed`` entry committed when the round opened. The seed and the update's id
determine which updates and steps are drawn, so neither side can choose them. An auditor repeats the drawn steps and
signs a verdict, which the hub records as ``audited`` or ``audit-failed``.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Mapping
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationError, model_validator

from gym_fed.config.schema.base import StrictModel, first_problem
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.core.json_files import canonical_digest
from gym_fed.trust.identity.history import History
from gym_fed.trust.identity.keys import SigningKey, verify_signature
from gym_fed.trust.identity.manifest import Sha256
from gym_fed.trust.identity.statements import ContributorId, PublicKeyHex
from gym_fed.trust.ledger.entries import Entry, corrupt, is_hash
from gym_fed.trust.ledger.evaluations import commitment, drawn_rows
from gym_fed.trust.ledger.merkle import Tree

DRAW_KIND = "audit-draw"
AUDITED = "audited"
FAILED = "audit-failed"
VERDICT_KINDS = (AUDITED, FAILED)
MAX_VERDICT_BYTES = 32 * 1024
StepNumber = Annotated[str, Field(pattern=r"^[1-9][0-9]{0,5}$")]
_MAX_STEPS = 64
_MAX_DRAWN_STEPS = 10_000_000
"""Maximum number of hashes (drawn updates times steps) for the verification of one draw."""


def step_leaf(step: int, batch_digest: str, state_digest: str) -> str:
    """Return the leaf for the state after ``step`` in the Merkle tree of a training run, as hex SHA-256.

    Args:
        step: Number of the step, starting from 1; 0 for the state before training.
        batch_digest: Digest of the step's batch; empty for step 0.
        state_digest: Digest of the adapter's weights and the optimiser's moments after the step.
    """
    return canonical_digest({"gym-step-1": {"step": step, "batch": batch_digest, "state": state_digest}})


def training_root(leaves: Iterable[str]) -> str:
    """Return the Merkle root over the leaves of a training run."""
    tree = Tree(leaves)
    return tree.root(tree.size)


def is_drawn(seed: bytes, update: str, rate: float) -> bool:
    """Return True if an update is drawn, which happens with probability ``rate``."""
    word = hashlib.sha256(seed + f"audit {update}".encode()).digest()
    return int.from_bytes(word[:8], "big") / 2**64 < rate


def drawn_steps(seed: bytes, update: str, num_steps: int, rate: float, steps: int) -> list[int]:
    """Draw the steps of an update to audit.

    Args:
        seed: Seed of the round.
        update: Id of the update.
        num_steps: Number of training steps of the update.
        rate: Probability that an update is drawn.
        steps: Number of steps to draw.

    Returns:
        Step numbers from 1, sorted; empty if the update is not drawn.
    """
    if not is_drawn(seed, update, rate):
        return []
    return [row + 1 for row in drawn_rows(seed, f"audit {update}", num_steps, min(steps, num_steps))]


def draw(
    seed: bytes, updates: Iterable[str], num_steps: int, rate: float, steps: int
) -> dict[str, list[int]]:
    """Return the drawn steps of every drawn update, by update id."""
    chosen = {update: drawn_steps(seed, update, num_steps, rate, steps) for update in sorted(updates)}
    return {update: numbers for update, numbers in chosen.items() if numbers}


def chance_of_catching(num_steps: int, num_false: int, drawn: int) -> float:
    """Return the probability that at least one of ``num_false`` false steps is among ``drawn`` of ``num_steps`` steps.

    It is ``1 - C(n - m, k) / C(n, k)``, and applies only if the update is drawn.

    Raises:
        ValueError: Unless ``num_false`` and ``drawn`` are between 0 and ``num_steps``.
    """
    if not (0 <= num_false <= num_steps and 0 <= drawn <= num_steps):
        raise ValueError(f"{num_false} false and {drawn} drawn steps of {num_steps}")
    return 1.0 - math.comb(num_steps - num_false, drawn) / math.comb(num_steps, drawn)


class AuditVerdict(StrictModel):
    """The result of one audit, to be signed by the auditor."""

    format: Literal["gym-audit-verdict-1"] = "gym-audit-verdict-1"
    auditor: ContributorId
    server: str = Field(max_length=128)
    server_round: int = Field(ge=1, lt=2**53)
    update: Sha256
    outcome: Literal["passed", "failed", "unanswered"]
    reason: str = Field("", max_length=500)
    """The reason why the audit failed; empty for ``passed``."""
    distances: dict[StepNumber, float] = Field(default_factory=dict, max_length=_MAX_STEPS)
    """The difference of each repeated step as a fraction of the step, by step number."""
    tolerance: float = Field(gt=0)
    issued_at_seconds: int = Field(ge=0, lt=2**53)

    @model_validator(mode="after")
    def _validate_outcome(self) -> AuditVerdict:
        if (self.outcome == "passed") != (not self.reason):
            raise ValueError("reason: required for every outcome but passed")
        if self.outcome == "passed" and any(value > self.tolerance for value in self.distances.values()):
            raise ValueError("distances: one is above the tolerance, but the outcome is passed")
        return self

    @property
    def kind(self) -> str:
        """The kind of the ledger entry that records the verdict."""
        return AUDITED if self.outcome == "passed" else FAILED


class SignedVerdict(StrictModel):
    """A verdict with its signature; the content of the file that an auditor sends to the coordinator."""

    verdict: AuditVerdict
    public_key: PublicKeyHex
    signature: str = Field(pattern=r"^[0-9a-f]{128}$")

    @classmethod
    def of(cls, verdict: AuditVerdict, key: SigningKey) -> SignedVerdict:
        """Sign a verdict."""
        signature = key.sign(verdict.model_dump(mode="json")).hex()
        return cls(verdict=verdict, public_key=key.public_key.hex(), signature=signature)

    def verify(self) -> None:
        """Raise ``SIGNATURE_INVALID`` unless the verdict was signed with ``public_key``."""
        key, signature = bytes.fromhex(self.public_key), bytes.fromhex(self.signature)
        verify_signature(key, self.verdict.model_dump(mode="json"), signature)

    @classmethod
    def parse(cls, text: str, name: str) -> SignedVerdict:
        """Parse the file of a verdict; ``name`` is used in error messages.

        Raises:
            GymError: ``AUDIT_INVALID`` with the first invalid field.
        """
        if len(text) > MAX_VERDICT_BYTES:
            raise GymError(
                ErrorCode.AUDIT_INVALID,
                f"{name} is larger than the maximum of a verdict, {MAX_VERDICT_BYTES} bytes",
            )
        try:
            return cls.model_validate_json(text)
        except (ValidationError, RecursionError) as error:
            problem = first_problem(error) if isinstance(error, ValidationError) else "nested too deeply"
            raise GymError(
                ErrorCode.AUDIT_INVALID,
                f"{name} is not a verdict of an audit: {problem}",
                "write it with: gym-client audit check",
            ) from error


class AuditCheck:
    """Verifies that draws match the committed seeds, and that auditors signed the verdicts on drawn updates.

    Args:
        promised: Commitments to the seeds of the rounds so far, by round; the caller keeps adding to it.
        history: The keys of the accounts so far.
    """

    def __init__(self, promised: Mapping[int, str], history: History) -> None:
        self._promised, self._history = promised, history
        self._merged: dict[int, list[str]] = {}
        self._rounds: set[int] = set()
        self._drawn: dict[str, tuple[int, list[int]]] = {}
        self._judged: set[str] = set()

    def add(self, entry: Entry, body: dict[str, Any]) -> None:
        """Process the next entry.

        Raises:
            GymError: ``STATE_CORRUPT`` with the entry and what is wrong with it.
        """
        if entry.kind not in ("version", DRAW_KIND, *VERDICT_KINDS):
            return
        where = f"entry {entry.sequence} ({entry.kind})"
        try:
            if entry.kind == "version":
                if isinstance(body.get("updates"), list):
                    self._merged[body["server_round"]] = body["updates"]
            elif entry.kind == DRAW_KIND:
                self._check_draw(where, body)
            else:
                self._check_verdict(where, entry.kind, body)
        except (KeyError, TypeError, ValueError, OverflowError, AttributeError) as error:
            raise corrupt(f"{where}: it is not a valid audit record: {error!r:.80}") from error

    def _check_draw(self, where: str, body: dict[str, Any]) -> None:
        server_round, seed = int(body["server_round"]), bytes.fromhex(body["seed"])
        if self._promised.get(server_round) != commitment(seed, server_round):
            raise corrupt(f"{where}: the seed does not match the commitment of round {server_round}")
        if server_round in self._rounds:
            raise corrupt(f"{where}: the audits of round {server_round} were drawn before")
        updates, num_steps, terms = body["updates"], int(body["num_steps"]), body["terms"]
        if sorted(updates) != sorted(self._merged.get(server_round, [])):
            raise corrupt(f"{where}: its updates are not those of round {server_round}")
        if not all(is_hash(update) for update in updates):  # the ids become file names in commands
            raise corrupt(f"{where}: an update's id is not a digest")
        num_drawn = sum(is_drawn(seed, update, float(terms["rate"])) for update in updates)
        if not 0 < num_steps * max(1, num_drawn) <= _MAX_DRAWN_STEPS:
            raise corrupt(f"{where}: it draws from more than {_MAX_DRAWN_STEPS} steps")
        drawn = draw(seed, updates, num_steps, float(terms["rate"]), int(terms["steps"]))
        if drawn != body["drawn"]:
            raise corrupt(f"{where}: the drawn steps are not those of the seed")
        self._rounds.add(server_round)
        self._drawn |= {update: (server_round, steps) for update, steps in drawn.items()}

    def _check_verdict(self, where: str, kind: str, body: dict[str, Any]) -> None:
        signed = SignedVerdict.model_validate(body["signed"])
        verdict = signed.verdict
        if (verdict.update, verdict.kind) != (body["update"], kind):
            raise corrupt(f"{where}: the signed verdict is about something else")
        if self._drawn.get(verdict.update, (0, []))[0] != verdict.server_round:
            raise corrupt(f"{where}: update {verdict.update[:12]} was not drawn in that round")
        if verdict.update in self._judged:
            raise corrupt(f"{where}: update {verdict.update[:12]} was audited before")
        if self._history.current(verdict.auditor) != bytes.fromhex(signed.public_key):
            raise corrupt(f"{where}: it is not signed by the auditor's key")
        try:
            signed.verify()
        except GymError as error:
            raise corrupt(f"{where}: it is not signed by the auditor") from error
        steps = self._drawn[verdict.update][1]
        if verdict.outcome == "passed" and sorted(map(int, verdict.distances)) != steps:
            raise corrupt(f"{where}: it passed without all drawn steps")
        self._judged.add(verdict.update)
