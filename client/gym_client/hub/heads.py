"""Signed ledger heads of a hub, and checks that they do not contradict each other.

Heads are stored in ``servers/<hub id>/heads.jsonl``. If a hub rewrites its ledger, or shows different ledgers to
different contributors, it signs heads that contradict each other. The contradiction is then written to ``proofs/``, and
further calls to that hub are refused.

A hub that was restored from a backup contradicts itself too. If a signed statement explains this, the contributor may
accept it. The statement is then appended to the file, where it supersedes the lost heads before it.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gym_client.hub.replies import NOT_ITS_OWN, heads_in_force, is_statement, refused_as_unsigned
from gym_client.identity.home import Home
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.core.files import append_lines, drop_torn_line, make_folder, write_atomically
from gym_fed.trust.identity.keys import server_id
from gym_fed.trust.ledger.heads import EntryProof, SignedHead, check_fork, contradiction, fork_document
from gym_fed.trust.ledger.restored import KIND as RESTORED
from gym_fed.trust.ledger.restored import HubRestored, SignedRestored

log = logging.getLogger("gym_client")

Prove = Callable[[int, int], EntryProof]
"""Requests a proof: the entry with a sequence number under the head of a size; size 0 means the newest head."""

Statements = Callable[[], Sequence[str]]
"""Requests the hub's restore statements, in the format of ``StatusReply.restored_json``."""


def no_statements() -> Sequence[str]:
    """Return no statements; used for a hub that is unreachable."""
    return ()


@dataclass
class _Conflict(Exception):
    """Raised if a stored head and the hub's reply cannot belong to the same ledger.

    Attributes:
        kept: The stored head.
        shown: The head that contradicts it; None if the hub only fails to show the stored head.
        reason: Description of the contradiction.
        proof: The entry proof that is needed to prove it, if any.
    """

    kept: SignedHead
    shown: SignedHead | None = None
    reason: str = ""
    proof: EntryProof | None = None


class Heads:
    """The signed heads of one hub.

    Args:
        home: The contributor's folder.
        public_key: The key that signs the hub's ledger.
    """

    def __init__(self, home: Home, public_key: bytes) -> None:
        self._home = home
        self._key = public_key
        self.server = server_id(public_key)

    @property
    def path(self) -> Path:
        """The path of the file of heads, one per line in the order of arrival."""
        return self._home.servers / self.server / "heads.jsonl"

    def kept(self) -> dict[int, SignedHead]:
        """Read the stored heads, by size.

        Raises:
            GymError: ``STATE_CORRUPT`` for an invalid line. Signatures are only verified when heads are compared.
        """
        if not self.path.exists():
            return {}
        stamp, (known_as, known) = _stamp(self.path), _parsed.get(self.path, ((0, 0), {}))
        if stamp != known_as:
            known = heads_in_force(self._lines())
            _parsed[self.path] = (stamp, known)
        return dict(known)

    def accepted(self) -> list[SignedRestored]:
        """Read the accepted restore statements, oldest first."""
        return [SignedRestored.from_json(line) for line in self._lines() if is_statement(line)]

    def newest(self) -> SignedHead | None:
        """Return the largest stored head; None if there is none."""
        return max(self.kept().values(), key=lambda head: head.size, default=None)

    def require_one_ledger(self, prove: Prove | None = None, statements: Statements = no_statements) -> None:
        """Raise ``LEDGER_FORKED`` if ``proofs/`` already contains a proof that this hub has two ledgers.

        Args:
            prove: Requests a proof from the hub; None if the hub is unreachable.
            statements: Requests the hub's statements. If one explains the proof, ``HUB_RESTORED`` is raised instead.

        Raises:
            GymError: ``LEDGER_FORKED``; ``HUB_RESTORED``; ``STATE_CORRUPT`` for a file that does not prove a fork.
        """
        for path in sorted(self._home.proofs.glob(f"{self.server}-*.json")):
            try:
                document = json.loads(path.read_bytes())
                check_fork(document, self._key)
            except (ValueError, RecursionError, GymError) as error:
                why = error.message if isinstance(error, GymError) else str(error)
                raise GymError(
                    ErrorCode.STATE_CORRUPT,
                    f"{path} does not prove two ledgers of {self.server}: {why}",
                    "the file was changed after its check: inspect it, then move it away",
                ) from error
            if prove is not None:
                for head in document["heads"]:
                    self._require_unexplained(SignedHead.from_dict(head), prove, statements)
            raise GymError(
                ErrorCode.LEDGER_FORKED,
                f"the hub {self.server} has two ledgers; the proof is in {path}",
                "show the file to the other contributors and to the coordinator; this home does not work for the hub "
                "while the file exists",
            )

    def see(
        self,
        head: SignedHead,
        prove: Prove,
        is_newest: bool = False,
        statements: Statements = no_statements,
    ) -> None:
        """Compare a head with all stored heads, and store it.

        Args:
            head: The head to check, from the hub or another source.
            prove: Requests the hub's proof that the head extends a stored one.
            is_newest: True if the hub sent the head as its newest.
            statements: Requests the hub's statements if the head contradicts a stored one.

        Raises:
            GymError: ``SIGNATURE_INVALID``; ``LEDGER_FORKED`` with the path of the proof; ``HUB_RESTORED`` if a
                statement of the hub explains the contradiction; errors from ``prove``.
        """
        with refused_as_unsigned(NOT_ITS_OWN):
            head.verify(self._key)
        try:
            self._see(head, prove, is_newest)
        except _Conflict as conflict:
            for old in self.accepted():
                if old.covers(head) and head.size not in self.kept():
                    raise GymError(
                        ErrorCode.HUB_RESTORED,
                        f"the head of entry {head.size} covers entries that {self.server} lost when it was "
                        f"restored at entry {old.statement.restored_at_entry}, which this home accepted",
                        "a contributor that still has this head sees the same statement, and may accept the restore",
                    ) from None
            self._require_unexplained(conflict.kept, prove, statements)
            raise self._blamed(conflict) from None

    def _see(self, head: SignedHead, prove: Prove, is_newest: bool) -> None:
        known = self.kept()
        if (same := known.get(head.size)) is not None:
            self._require_own(same)
            self._refuse_if(same, head, None)
            if not is_newest or head.size == max(known):
                return
        if known:
            self._require_own(known[max(known)])
            self._compare(known[max(known)], head, prove, is_newest)
        if same is None:
            self._append(head)

    def accuse(
        self,
        kept: SignedHead,
        others: Iterable[SignedHead],
        prove: Prove,
        statements: Statements = no_statements,
    ) -> None:
        """Raise the error for a fork between a stored head and a verified ledger that does not contain it.

        Args:
            kept: The stored head. The ledger has a different entry at its size, or different entries before it.
            others: Heads of the ledger; the last one covers the whole ledger.
            prove: Proves an entry under the last head.
            statements: The restore statements in the ledger.

        Raises:
            GymError: ``LEDGER_FORKED`` with its proof; ``HUB_RESTORED``; ``STATE_CORRUPT`` if the file of stored
                heads was changed.
        """
        self._require_own(kept)
        self._require_unexplained(kept, prove, statements)
        last = kept
        try:
            for last in others:
                self._refuse_if(kept, last, None)
            self._refuse_if(kept, last, prove(kept.size, last.size))
        except _Conflict as conflict:
            raise self._blamed(conflict) from None
        raise GymError(
            ErrorCode.STATE_CORRUPT,
            f"{self.server} signed a head of size {kept.size} that does not match its ledger; the head is in "
            f"{self.path}",
            "show the head and the ledger to the other contributors and to the coordinator",
        )

    def _compare(self, old: SignedHead, new: SignedHead, prove: Prove, is_newest: bool) -> None:
        self._refuse_if(old, new, None)
        if new.size >= old.size:
            low, size, shown = old, new.size, new
        elif is_newest:  # another thread may have stored a later head, so ask the hub again
            low, size, shown = old, 0, new
        else:
            low, size, shown = new, old.size, old
        if size == low.size:
            return
        try:
            proof = prove(low.size, size)
        except GymError as error:
            if error.code is not ErrorCode.NOT_FOUND:
                raise
            raise _Conflict(old) from error
        with refused_as_unsigned(NOT_ITS_OWN):
            proof.verify(self._key)
        if proof.entry.sequence != low.size or (size and proof.head.size != size):
            raise GymError(
                ErrorCode.SIGNATURE_INVALID,
                f"{self.server} proves entry {proof.entry.sequence} under size {proof.head.size}; "
                f"entry {low.size} under size {size} was requested",
            )
        if size:
            self._refuse_if(shown, proof.head, None)
        self._refuse_if(low, proof.head, proof)

    def _refuse_if(self, first: SignedHead, other: SignedHead, proof: EntryProof | None) -> None:
        reason = contradiction(first, other, proof)
        if reason is not None:
            raise _Conflict(first, other, reason, proof)

    def _blamed(self, conflict: _Conflict) -> GymError:
        """Create the error for an unexplained conflict."""
        if conflict.shown is None:
            return self.withheld(conflict.kept)
        return self._forked(f"it signed {conflict.reason}", (conflict.kept, conflict.shown), conflict.proof)

    def require_shown(self, prove: Prove, statements: Statements) -> None:
        """Raise the error for a hub that shows no head although it has signed one.

        Raises:
            GymError: ``HUB_RESTORED`` if the hub has a statement for it; otherwise ``STATE_CORRUPT``.
        """
        newest = self.newest()
        if newest is not None:
            self._require_unexplained(newest, prove, statements)
            raise self.withheld(newest)

    def _require_unexplained(self, kept: SignedHead, prove: Prove, statements: Statements) -> None:
        """Raise ``HUB_RESTORED`` if a statement in the hub's ledger explains the conflict with a stored head."""
        accepted = {signed.to_json() for signed in self.accepted()}
        for text in reversed(statements()):
            try:
                document = json.loads(text)
                signed = SignedRestored.from_dict(document)
                signed.verify(self._key)
                if signed.to_json() in accepted or not signed.covers(kept):
                    continue
                proof = prove(int(document["entry"]), 0)
                proof.verify(self._key)
            except (GymError, ValueError, RecursionError, KeyError, TypeError) as error:
                log.warning("the restore statement of %s is refused: %s", self.server, error)
                continue
            body = proof.entry.body
            if proof.entry.kind == RESTORED and SignedRestored.from_dict(body) == signed:
                raise HubRestored(
                    signed,
                    f"the hub {self.server} declares that it was restored from a backup at entry "
                    f"{signed.statement.restored_at_entry}; entry {kept.size} and others that it signed are gone",
                    "gym-client ledger restored shows what you lose; with --accept, it accepts the restore",
                )

    def accept(self, signed: SignedRestored) -> int:
        """Accept a restore, which supersedes the lost heads.

        Returns:
            The number of superseded heads; they stay in the file before the statement.
        """
        signed.verify(self._key)
        gone = [head for head in self.kept().values() if signed.covers(head)]
        for path in sorted(self._home.proofs.glob(f"{self.server}-*.json")):
            heads = [SignedHead.from_dict(document) for document in json.loads(path.read_bytes())["heads"]]
            if any(signed.covers(head) for head in heads):
                (self._home.proofs / "superseded").mkdir(exist_ok=True)
                os.replace(path, self._home.proofs / "superseded" / path.name)
        if signed.to_json() not in {old.to_json() for old in self.accepted()}:
            self._write(signed.to_json())
        return len(gone)

    def keep_proof(self, document: dict[str, Any]) -> tuple[Path, str]:
        """Verify the proof of a fork and store it in ``proofs/``. Return its path and a description of the fork.

        Raises:
            GymError: ``STATE_CORRUPT`` if it does not prove a fork.
        """
        reason = check_fork(document, self._key)
        low, high = sorted(int(signed["head"]["size"]) for signed in document["heads"])
        path = self._home.proofs / f"{self.server}-{low}-{high}.json"
        write_atomically(path, json.dumps(document, indent=2, sort_keys=True).encode())
        return path, reason

    def withheld(self, head: SignedHead | None) -> GymError:
        """Create the error for a hub that does not show a head that it has signed.

        Either the hub was restored without a statement, or it hides entries. The signatures do not prove this to others
        until the hub signs a different entry in place of a hidden one.
        """
        entry = f"entry {head.size}" if head is not None else "any head"
        return GymError(
            ErrorCode.STATE_CORRUPT,
            f"the hub {self.server} cannot show {entry}, which it signed, in its current ledger",
            f"the hub was reset to an older state, or withholds entries. Ask its coordinator, who can sign a restore "
            f"statement: gym-server restore --fork. The hub's signed heads are in {self.path}",
        )

    def _forked(self, why: str, heads: tuple[SignedHead, SignedHead], proof: EntryProof | None) -> GymError:
        path, _ = self.keep_proof(fork_document(self._key, heads, proof))
        return GymError(
            ErrorCode.LEDGER_FORKED,
            f"the hub {self.server} has two ledgers: {why}. Both signed heads are in {path}",
            "show the file to the other contributors and to the coordinator; nothing is sent to this hub until it "
            "signs a restore statement (gym-server restore --fork) and you accept the restore",
        )

    def _require_own(self, head: SignedHead) -> None:
        """Verify a stored head again before it is used as evidence against the hub."""
        try:
            head.verify(self._key)
        except GymError as error:
            raise GymError(
                ErrorCode.STATE_CORRUPT,
                f"{self.path}: {error.message}: the file was changed after the head was checked",
                "delete the line of that head; the hub's newest head is then stored again",
            ) from error

    def _append(self, head: SignedHead) -> None:
        known = self.kept()
        self._write(head.to_json())
        _parsed[self.path] = (_stamp(self.path), {**known, head.size: head})

    def _lines(self) -> list[str]:
        text = self.path.read_text(encoding="utf-8") if self.path.exists() else ""
        # Not splitlines: a statement's reason may contain U+2028. A crash may have truncated the last line.
        return text.split("\n")[:-1]

    def _write(self, line: str) -> None:
        make_folder(self.path.parent)
        drop_torn_line(self.path)
        append_lines(self.path, [line])


_parsed: dict[Path, tuple[tuple[int, int], dict[int, SignedHead]]] = {}
"""Parsed heads by file, with the file's size and modification time. A cache, since long files are read often."""


def _stamp(path: Path) -> tuple[int, int]:
    status = path.stat()
    return status.st_size, status.st_mtime_ns
