"""Exported ledgers, which anyone can verify without the hub: a header, entries and signed heads, one per line.

    {"format":"gym-ledger-1","public_key":HEX,"server":ID}
    {"body":{...},"hash":HEX,"kind":TEXT,"previous_hash":HEX,"sequence":N}
    {"head":{...},"signature":HEX}

Every line is canonical JSON and ends with a line feed. A head follows the last entry that it covers. The last line is a
head, so that everything before it is signed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.trust.identity.history import History
from gym_fed.trust.identity.keys import server_id
from gym_fed.trust.ledger.audits import AuditCheck
from gym_fed.trust.ledger.entries import Chain, Entry, canonical_text, corrupt, parsed
from gym_fed.trust.ledger.evaluations import EvaluationCheck
from gym_fed.trust.ledger.fields import check_fields
from gym_fed.trust.ledger.heads import HEADS_BEFORE, SignedHead
from gym_fed.trust.ledger.lineage import LineageCheck
from gym_fed.trust.ledger.merkle import Frontier
from gym_fed.trust.ledger.restored import KIND as RESTORED
from gym_fed.trust.ledger.restored import SignedRestored

FORMAT = "gym-ledger-1"

Visit = Callable[[Entry, dict[str, Any]], None]
"""Called with every verified entry and its body."""


@dataclass(frozen=True)
class Checked:
    """The result of a verification.

    Attributes:
        entries: Number of entries.
        heads: Number of signed heads.
        head: The last head; None if there is none.
        late_seeds: Rounds whose seed was drawn late, from ``EvaluationCheck.late``.
    """

    entries: int
    heads: int
    head: SignedHead | None
    late_seeds: tuple[int, ...] = ()


class LedgerCheck:
    """Verifies entries and heads in order.

    It checks the hash chain, canonical form, fields, Merkle roots, signatures of hub and owners, the lineage of
    versions, revealed seeds, and audits.

    Args:
        public_key: The hub's public key.
        visit: Called with every verified entry.
    """

    def __init__(self, public_key: bytes, visit: Visit = lambda entry, body: None) -> None:
        self._key = public_key
        self._visit = visit
        self._chain = Chain()
        self.frontier = Frontier()
        self.history = History(server_id(public_key))
        self._evaluations = EvaluationCheck()
        self._audits = AuditCheck(self._evaluations.promised, self.history)
        self._lineage = LineageCheck()
        self._heads = 0
        self._last: SignedHead | None = None

    def entry(self, entry: Entry) -> None:
        """Check the next entry."""
        body = self._chain.add(entry)
        if (before := body.get(HEADS_BEFORE, self._heads)) != self._heads:
            raise corrupt(
                f"entry {entry.sequence} counts {str(before)[:80]} signed heads, but {self._heads} are stored"
            )
        check_fields(entry, body)
        self.frontier.append(entry.hash)
        self.history.add(entry.kind, body)
        self._evaluations.add(entry, body)
        self._audits.add(entry, body)
        self._lineage.add(entry, body)
        if entry.kind == RESTORED:
            self._check_restored(entry, body)
        self._visit(entry, body)

    def _check_restored(self, entry: Entry, body: dict[str, Any]) -> None:
        signed = SignedRestored.from_dict(body)
        signed.verify(self._key)
        at = signed.statement.restored_at_entry
        if at >= entry.sequence or (
            at == entry.sequence - 1 and signed.statement.hash != entry.previous_hash
        ):
            raise corrupt(
                f"entry {entry.sequence} says that the ledger continues from a different entry {at}"
            )

    def head(self, signed: SignedHead) -> None:
        """Check a head; its size must equal the number of entries before it."""
        signed.verify(self._key)
        head, before = signed.head, self._last.head if self._last else None
        if head.size != self._chain.size:
            raise corrupt(f"head {head.size} follows entry {self._chain.size}")
        if head.hash != self._chain.hash:
            raise corrupt(f"head {head.size} has a different entry {head.size}")
        if head.root != self.frontier.root():
            raise corrupt(f"head {head.size} has a different Merkle root from that of the entries before it")
        if before is not None and not (before.size < head.size and before.at <= head.at):
            raise corrupt(f"head {head.size} does not follow head {before.size}")
        self._heads, self._last = self._heads + 1, signed

    def done(self) -> Checked:
        """Finish the verification and return its result."""
        return Checked(self._chain.size, self._heads, self._last, tuple(self._evaluations.late))


def first_line(public_key: bytes) -> str:
    """Return the file's first line, without the line feed."""
    header = {"format": FORMAT, "public_key": public_key.hex(), "server": server_id(public_key)}
    return canonical_text(header)


def lines(entries: Iterable[Entry], heads: Iterable[SignedHead]) -> Iterator[str]:
    """Yield the lines of a file: entries, sorted by sequence number, with heads between them, sorted by size."""
    waiting = iter(heads)
    head = next(waiting, None)
    for entry in entries:
        yield (
            f'{{"body":{entry.body_json},"hash":"{entry.hash}","kind":{canonical_text(entry.kind)},'
            f'"previous_hash":"{entry.previous_hash}","sequence":{entry.sequence}}}'
        )
        while head is not None and head.size <= entry.sequence:
            yield head.to_json()
            head = next(waiting, None)


def verify_file(
    path: Path, public_key: bytes | None = None, visit: Visit = lambda entry, body: None
) -> tuple[bytes, Checked]:
    """Verify an exported ledger.

    Args:
        path: The file.
        public_key: The expected public key; None for the file's own, which proves only that the file is consistent.
        visit: Called with every verified entry.

    Returns:
        The public key, and the result of the verification.

    Raises:
        GymError: ``FILE_NOT_FOUND``; ``STATE_CORRUPT`` with the line and its problem.
    """
    try:
        file = path.open("rb")
    except OSError as error:
        raise GymError(ErrorCode.FILE_NOT_FOUND, f"no ledger at {path}: {error.strerror}") from error
    with file:
        return verify_lines(file, str(path), public_key, visit)


def verify_lines(
    rows: Iterable[bytes], name: str, public_key: bytes | None = None, visit: Visit = lambda entry, body: None
) -> tuple[bytes, Checked]:
    """Verify the lines of an exported ledger, each with its line feed; ``name`` stands for the file in errors."""
    check: LedgerCheck | None = None
    last_is_head, key = False, b""
    for number, raw in enumerate(rows, 1):
        try:
            value = _value(raw)
            if check is None:
                key = _key(value, public_key)
                check = LedgerCheck(key, visit)
                continue
            last_is_head = "head" in value
            if last_is_head:
                check.head(SignedHead.from_dict(value))
            else:
                check.entry(Entry.from_dict(value))
        except GymError as error:
            raise GymError(error.code, f"{name}, line {number}: {error.message}", error.hint) from error
    if check is None or not last_is_head:
        raise corrupt(f"{name} does not end with a signed head: it was cut short")
    return key, check.done()


def _value(raw: bytes) -> dict[str, Any]:
    try:
        value = parsed(raw.removesuffix(b"\n").decode("utf-8")) if raw.endswith(b"\n") else NotImplemented
    except UnicodeDecodeError:
        value = NotImplemented
    if not isinstance(value, dict):
        raise corrupt("not canonical JSON, as a line of an exported ledger must be")
    return value


def _key(value: dict[str, Any], expected: bytes | None) -> bytes:
    text = value.get("public_key")
    if (
        value.get("format") != FORMAT
        or not isinstance(text, str)
        or set(value) != {"format", "public_key", "server"}
    ):
        raise corrupt(f"this is not the first line of an exported ledger of format {FORMAT}")
    try:
        key = bytes.fromhex(text)
    except ValueError as error:
        raise corrupt("the public key is not hex") from error
    if len(key) != 32 or key.hex() != text or server_id(key) != value["server"]:
        raise corrupt("the hub's id does not match its public key")
    if expected is not None and key != expected:
        raise corrupt(f"it is the ledger of {server_id(key)}, not of {server_id(expected)}")
    return key
