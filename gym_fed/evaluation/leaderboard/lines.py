"""The signed lines of a leaderboard.

A line is an entry of ``gym_fed.trust.ledger.entries`` with ``content``, ``public_key`` and ``signature`` in its body.
The signature covers the content, the line's number and the hash of the line before. Therefore only its signer can move
a line, and removing one would require all later signers to sign again.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field, ValidationError, model_validator

from gym_fed.config.schema.base import StrictModel, first_problem
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.core.text import counted, is_name
from gym_fed.trust.identity.keys import SigningKey, contributor_id, verify_signature
from gym_fed.trust.ledger.entries import GENESIS_HASH, Entry

SUBMITTED, REPRODUCED = "submitted", "reproduced"
"""Types of lines."""

MAX_NAME = 96

Hash = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
Short = Annotated[str, Field(min_length=1, max_length=200)]


class _Content(StrictModel):
    model_config = ConfigDict(strict=True)


class BoardFigure(_Content):
    """A metric of a task."""

    value: float
    stderr: float | None = None
    higher_is_better: bool = True


class BoardTask(_Content):
    """A task of a submission."""

    task: Short
    version: Annotated[str, Field(max_length=200)]
    num_fewshot: int = Field(ge=0, le=10_000)
    lock: Annotated[str, Field(max_length=200)]
    """The digest of the task's definition and rows."""
    num_samples: int = Field(ge=1, le=2_000_000)
    main_metric: Short
    figures: dict[Short, BoardFigure] = Field(min_length=1, max_length=100)

    @model_validator(mode="after")
    def _has_its_main_metric(self) -> BoardTask:
        if self.main_metric not in self.figures:
            raise ValueError(f"no figure of {self.main_metric}")
        return self


class Submission(_Content):
    """The reported results of a model."""

    model_name: Annotated[str, Field(max_length=MAX_NAME)]
    organization: Annotated[str, Field(max_length=MAX_NAME)]
    record: Annotated[str, Field(pattern=r"^[0-9a-f-]{36}$")]
    """The record's id."""
    identity: dict[Short, Annotated[str, Field(max_length=1000)]] = Field(min_length=1, max_length=50)
    """The identity of the results: digests of weights, suite and template; decoding and engine."""
    results: Hash
    """The SHA-256 of the record's file of samples."""
    tasks: list[BoardTask] = Field(min_length=1, max_length=1000)
    at: int = Field(ge=0, lt=2**53)
    """Unix seconds by the submitter's clock."""

    @model_validator(mode="after")
    def _is_named(self) -> Submission:
        for name in (self.model_name, self.organization):
            if not is_name(name, MAX_NAME):
                raise ValueError("model_name and organization must have 1 to 96 visible characters")
        if len({task.task for task in self.tasks}) < len(self.tasks):
            raise ValueError("a task occurs twice")
        return self

    @property
    def num_samples(self) -> int:
        """The number of samples of all tasks."""
        return sum(task.num_samples for task in self.tasks)


class Reproduction(_Content):
    """The result of re-running samples of a submission with a different key."""

    line: Hash
    """The submission's hash."""
    challenge: Annotated[str, Field(pattern=r"^[0-9a-f]{128}$")]
    """The reproducing key's signature of that hash. It selects the samples, which are thus unpredictable."""
    num_samples: int = Field(ge=1, le=100_000)
    outcome: Literal["reproduced", "differs"]
    parted: int = Field(ge=0)
    """Generated answers that diverged after a tie."""
    engine: Short
    at: int = Field(ge=0, lt=2**53)


class Line(_Content):
    """A verified line.

    Attributes:
        entry: Number, hashes and body.
        public_key: The signer's 32-byte Ed25519 public key.
    """

    model_config = ConfigDict(arbitrary_types_allowed=True)

    entry: Entry
    public_key: bytes
    content: Submission | Reproduction

    @property
    def signer(self) -> str:
        """The id of the account whose first key signed the line."""
        return contributor_id(self.public_key)


_CONTENTS: dict[str, type[Submission] | type[Reproduction]] = {
    SUBMITTED: Submission,
    REPRODUCED: Reproduction,
}


def sign_line(content: Submission | Reproduction, key: SigningKey, previous: Entry | None) -> Line:
    """Sign a line that follows ``previous``; None for the first one."""
    kind = SUBMITTED if isinstance(content, Submission) else REPRODUCED
    document = content.model_dump(mode="json")
    sequence, before = (previous.sequence + 1, previous.hash) if previous else (1, GENESIS_HASH)
    signature = key.sign(_claim(kind, document, sequence, before))
    body = {"content": document, "public_key": key.public_key.hex(), "signature": signature.hex()}
    entry = Entry.following((previous.sequence, previous.hash) if previous else None, kind, body)
    return Line(entry=entry, public_key=key.public_key, content=content)


def checked_line(entry: Entry, body: dict[str, Any]) -> Line:
    """Verify the form and signature of a line; its place in the chain is checked by the board.

    Raises:
        GymError: ``STATE_CORRUPT`` with the problem; ``SIGNATURE_INVALID``.
    """
    schema = _CONTENTS.get(entry.kind)
    if schema is None or set(body) != {"content", "public_key", "signature"}:
        raise corrupt("is not a line of a leaderboard")
    key, signature = _hex(body["public_key"], 32), _hex(body["signature"], 64)
    try:
        content = schema.model_validate(body["content"])
    except ValidationError as error:
        raise corrupt(first_problem(error, "content")) from error
    if content.model_dump(mode="json") != body["content"]:
        raise corrupt("lacks fields that every line must have")
    claim = _claim(entry.kind, body["content"], entry.sequence, entry.previous_hash)
    verify_signature(key, claim, signature)
    if isinstance(content, Reproduction):
        verify_signature(key, challenge_claim(content.line), bytes.fromhex(content.challenge))
    return Line(entry=entry, public_key=key, content=content)


def challenge_claim(line_hash: str) -> dict[str, str]:
    """Return the text that a key signs to select the samples that it re-runs."""
    return {"gym-leaderboard-challenge-1": line_hash}


def corrupt(message: str) -> GymError:
    """Create the error for a failed check of a board."""
    return GymError(
        ErrorCode.STATE_CORRUPT,
        f"leaderboard: {message}",
        "the file differs from the signed one: fetch it again, or restore it",
    )


def _claim(kind: str, content: Any, sequence: int, previous_hash: str) -> dict[str, Any]:
    return {
        "gym-leaderboard-1": {
            "content": content,
            "kind": kind,
            "previous_hash": previous_hash,
            "sequence": sequence,
        }
    }


def _hex(text: object, size: int) -> bytes:
    try:
        value = bytes.fromhex(text) if isinstance(text, str) else b""
    except ValueError:
        value = b""
    if len(value) != size or value.hex() != text:
        raise corrupt(f"a key or signature is not {counted(size, 'byte')} in hex")
    return value
