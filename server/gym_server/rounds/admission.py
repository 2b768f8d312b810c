"""Admission of submitted updates: each gets a verdict, with a reason if it is refused.

Cheap checks run first: form, signer, nonce, freshness, round and base, copies, bytes, norm. A verdict is written to the
ledger before the contributor receives it. Resending a manifest returns the same answer.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from sqlalchemy import Connection, select

from gym_fed.config.hub.sections import AdmissionConfig
from gym_fed.config.schema.plugins import only_recorded, recorded_in
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.core.text import counted, readable_seconds, without_folders
from gym_fed.delta.base import BaseSpec
from gym_fed.trust.identity.manifest import UpdateManifest
from gym_fed.trust.ledger.entries import SEALED, Entry, seal
from gym_server.ledger.chain import Ledger
from gym_server.ledger.columns import record_of
from gym_server.ledger.pace import count_refusal
from gym_server.privacy.secure_stages import check_upload
from gym_server.rounds.commitments import committed_at
from gym_server.rounds.continuous import require_fresh, round_to_join
from gym_server.rounds.round_store import COLLECTING
from gym_server.store.database import Database, rerun
from gym_server.store.objects import ObjectStore
from gym_server.store.tables import rounds, updates, versions


@dataclass(frozen=True)
class UpdateSubmission:
    """An update as submitted to the hub: its sender, its task with its round, and the signed manifest."""

    contributor: str
    public_key: bytes
    message_id: str
    server_round: int
    manifest_json: str
    signature: bytes


@dataclass(frozen=True)
class Receipt:
    """The contributor's proof of the verdict on an update."""

    update: str
    verdict: str
    code: str
    reason: str
    ledger_sequence: int
    ledger_hash: str
    proof: dict[str, Any]
    """A ledger entry under a signed head, verifiable by anyone: ``gym_fed.trust.ledger.heads.EntryProof``."""
    manifest: str = ""
    """The manifest that opens the sealed ledger entry, with the fields above; empty outside private rounds."""

    def to_json(self) -> str:
        fields = dict(self.__dict__)
        if not self.manifest:
            del fields["manifest"]
        return json.dumps(fields, sort_keys=True)


class Admission:
    """Checks the updates submitted to one hub.

    Args:
        database: The hub's database.
        ledger: The ledger that receives the verdicts.
        store: The hub's object store.
        config: Admission limits.
        server: Id of the hub.
        base: The base model that updates must match.
        private: If True, record nothing derived from an update's values, not even the digest of its file, which could
            confirm a guess.
        secure: If True, files contain masked votes, which have no norm.
        clock: The hub's clock, Unix seconds.
        max_staleness: Maximum age of an update in versions, in continuous rounds; None for synchronous rounds.
    """

    def __init__(
        self,
        database: Database,
        ledger: Ledger,
        store: ObjectStore,
        config: AdmissionConfig,
        server: str,
        base: BaseSpec,
        private: bool = False,
        secure: bool = False,
        clock: Callable[[], float] = time.time,
        max_staleness: int | None = None,
    ) -> None:
        self._clock = clock
        self._max_staleness = max_staleness
        self._secure = secure
        self._private = private
        self._database = database
        self._ledger = ledger
        self._store = store
        self._config = config
        self._server = server
        self._base = base

    @rerun
    def judge(self, submission: UpdateSubmission, also: Callable[[Connection, Receipt], None]) -> Receipt:
        """Judge a submission, and write the verdict, its ledger entry and the rows of ``also`` in one transaction.

        Files are read before the write lock is taken. A resubmitted update gets its first receipt again.

        Raises:
            GymError: If the submission is not authentic (form, signer, nonce). The ledger records this, and the task
                stays unanswered.
        """
        norm, flaw = self._examine(submission)
        unauthentic: GymError | None = None
        task_round = submission.server_round
        with self._database.transaction() as tx:
            if self._max_staleness is not None:
                submission = replace(submission, server_round=round_to_join(tx))
            try:
                manifest = self._check_signed(tx, submission)
            except GymError as error:
                self._count_refused(tx, submission, error)
                unauthentic = error
            else:
                known = tx.execute(select(updates).where(updates.c.update_id == manifest.digest)).first()
                if known is None:
                    if flaw is None and not self._store.has(manifest.delta_sha256):
                        # gc ran in between and deleted the object, to which nothing referred yet
                        raise GymError(
                            ErrorCode.NOT_FOUND, f"object {manifest.delta_sha256} is gone", "upload it again"
                        )
                    refusal = self._refusal(tx, submission, manifest, task_round, flaw)
                    self._record(tx, submission, manifest, norm, refusal)
                    known = tx.execute(select(updates).where(updates.c.update_id == manifest.digest)).one()
                receipt = self._receipt(tx, known)
                also(tx, receipt)
        if unauthentic is not None:
            raise unauthentic
        return receipt

    def opening(self, row: Any) -> dict[str, str]:
        """Return the fields that open the seal of an ``updates`` row; empty if nothing is sealed."""
        if not self._ledger.private or row.verdict not in ("admitted", "refused"):
            return {}
        return {"manifest": row.manifest, "code": row.code}

    def _examine(self, submission: UpdateSubmission) -> tuple[float | None, GymError | None]:
        """Return the norm of an authentic submission's file, or the error that refuses it."""
        try:
            with self._database.reading() as tx:
                manifest = self._check_signed(tx, submission)
            return self._inspect(manifest), None
        except GymError as error:  # the ledger is public
            return None, GymError(error.code, without_folders(error.message), error.hint)

    def _refusal(
        self,
        tx: Connection,
        submission: UpdateSubmission,
        manifest: UpdateManifest,
        task_round: int,
        flaw: GymError | None,
    ) -> GymError | None:
        try:
            self._check_task(submission, manifest)
            if self._max_staleness is None:
                self._check_round(tx, submission, manifest)
            else:
                require_fresh(tx, manifest, task_round, self._base.digest, self._max_staleness)
            self._check_copies(tx, manifest, submission.server_round)
        except GymError as error:
            return error
        return flaw

    def _receipt(self, tx: Connection, row: Any) -> Receipt:
        proof = self._ledger.receipt(tx, row.ledger_sequence)
        entry = proof.entry
        verdict, reason, manifest = "admitted", row.reason, ""
        if row.verdict == "refused":
            verdict = "refused"
        elif entry.kind == SEALED:
            reason = ""  # the sealed reason; a later verdict has its own entry
        if entry.kind == SEALED:
            manifest = row.manifest
        return Receipt(
            row.update_id, verdict, row.code, reason, entry.sequence, entry.hash, proof.to_dict(), manifest
        )

    def _check_signed(self, tx: Connection, submission: UpdateSubmission) -> UpdateManifest:
        """Check form, signer and nonce.

        Raises:
            GymError: ``UPDATE_REFUSED``, ``SIGNATURE_INVALID``, ``REPLAYED``.
        """
        manifest = UpdateManifest.parse(submission.manifest_json)
        if manifest.contributor != submission.contributor:
            raise GymError(
                ErrorCode.SIGNATURE_INVALID,
                f"the manifest is from {manifest.contributor}, but was sent by {submission.contributor}",
                "sign your own updates with your own key",
            )
        manifest.verify(submission.public_key, submission.signature)
        where = (updates.c.contributor == manifest.contributor) & (updates.c.nonce == manifest.nonce)
        used = tx.execute(select(updates.c.update_id, updates.c.message_id).where(where)).first()
        if used is not None and (
            used.update_id != manifest.digest or used.message_id != submission.message_id
        ):
            raise GymError(
                ErrorCode.REPLAYED,
                f"nonce {manifest.nonce} was already used for update {used.update_id[:12]}",
                "every update needs its own manifest",
            )
        return manifest

    def _inspect(self, manifest: UpdateManifest) -> float | None:
        """Validate the uploaded file and return its L2 norm, or None for masked votes.

        Raises:
            GymError: ``NOT_FOUND`` if it was not uploaded, ``DELTA_INVALID``, ``BASE_MISMATCH``, ``UPDATE_REFUSED``.
        """
        from gym_fed.delta.file import DeltaFile
        from gym_fed.delta.mapped import DeltaLimits

        path = self._store.local_path(manifest.delta_sha256)
        size = path.stat().st_size
        if size != manifest.delta_bytes:
            raise GymError(
                ErrorCode.UPDATE_REFUSED,
                f"the manifest says {counted(manifest.delta_bytes, 'byte')}, but the object has {size}",
            )
        spec = BaseSpec(self._base.model_name, manifest.base_digest, self._base.shapes)
        if self._secure:
            check_upload(self._database, manifest, path, spec)
            return None
        limits = DeltaLimits(max_file_bytes=self._config.max_update_bytes, sums=False)
        with self._codecs_of_the_round(manifest), DeltaFile.open(path, spec, limits) as delta:
            norm = delta.norm()
        if self._config.max_norm is not None and norm > self._config.max_norm:
            raise GymError(
                ErrorCode.UPDATE_REFUSED,
                f"the update's norm {norm:.4g} is above the cap {self._config.max_norm:.4g}",
                "train for fewer steps or with a lower learning rate",
            )
        return norm

    @contextmanager
    def _codecs_of_the_round(self, manifest: UpdateManifest) -> Iterator[None]:
        """Allow only the codec plug-ins that the round's task names, so that an update cannot import others."""
        query = select(rounds.c.spec).where(rounds.c.server_round == manifest.server_round)
        with self._database.reading() as tx:
            recorded = recorded_in(tx.scalar(query) or "{}")
        try:
            with only_recorded(recorded, "the update"):
                yield
        except GymError as error:
            if error.code is not ErrorCode.MISSING_DEPENDENCY:
                raise
            raise GymError(
                ErrorCode.UPDATE_REFUSED,
                f"the update uses a codec that is not in the task of round {manifest.server_round}",
                "encode the update with the task's codec",
            ) from error

    def _check_task(self, submission: UpdateSubmission, manifest: UpdateManifest) -> None:
        if manifest.server != self._server:
            raise GymError(
                ErrorCode.STALE, f"the manifest is for hub {manifest.server}, but this is {self._server}"
            )
        if manifest.task != submission.message_id:
            raise GymError(ErrorCode.STALE, f"the manifest is for task {manifest.task}, not for this one")
        # The time of issue is not checked: the round and the task limit the manifest's validity more strictly.
        expired_for = self._clock() - manifest.expires_at_seconds
        if expired_for > 0:
            raise GymError(
                ErrorCode.STALE,
                f"the manifest expired {readable_seconds(expired_for)} ago on the hub's clock",
                "sign the update again; use the time in Status.hub_seconds",
            )

    def _check_round(self, tx: Connection, submission: UpdateSubmission, manifest: UpdateManifest) -> None:
        row = tx.execute(select(rounds).where(rounds.c.server_round == submission.server_round)).first()
        if manifest.server_round != submission.server_round or row is None or row.state != COLLECTING:
            state = row.state if row else "unknown"
            late = "late: " if row is not None and manifest.server_round == submission.server_round else ""
            raise GymError(
                ErrorCode.STALE,
                f"{late}round {manifest.server_round} accepts no more updates "
                f"(round {submission.server_round} is {state})",
                "wait for the next round",
            )
        spec = json.loads(row.spec)
        if spec.get("audit") is not None and manifest.training_root is None:
            raise GymError(
                ErrorCode.UPDATE_REFUSED,
                f"round {row.server_round} is audited, but the manifest has no training_root",
                "update gym-fed, and train again",
            )
        expected = spec["version_digest"]
        if manifest.base_digest != expected:
            raise GymError(
                ErrorCode.BASE_MISMATCH,
                f"the update is for base {manifest.base_digest[:19]}, "
                f"but round {row.server_round} starts from {expected[:19]}",
                "train from the task's version",
            )

    def _check_copies(self, tx: Connection, manifest: UpdateManifest, server_round: int) -> None:
        mine = updates.c.contributor == manifest.contributor
        same_round = (updates.c.server_round == server_round) & (updates.c.verdict != "refused")
        own = tx.scalar(select(updates.c.update_id).where(mine, same_round))
        if own is not None:
            raise GymError(
                ErrorCode.UPDATE_REFUSED,
                f"{manifest.contributor} already sent update {own[:12]} in round {server_round}",
            )
        # Honest accounts with the same rows may send the same bytes, but declare them before the first are merged.
        sha256 = manifest.delta_sha256
        declared_at = committed_at(tx, manifest.contributor, sha256) or self._clock()
        copied = tx.scalar(
            select(updates.c.contributor)
            .join(versions, versions.c.server_round == updates.c.server_round)
            .where(updates.c.delta_sha256 == sha256, updates.c.verdict == "merged")
            .where(versions.c.committed_at <= declared_at)
        )
        if copied is not None and copied != manifest.contributor and not self._private:
            raise GymError(
                ErrorCode.UPDATE_REFUSED,
                f"the delta is a copy of a delta by {copied} that was merged in an earlier round",
                "train on your own data",
            )

    def _record(
        self,
        tx: Connection,
        submission: UpdateSubmission,
        manifest: UpdateManifest,
        norm: float | None,
        refusal: GymError | None,
    ) -> None:
        row = {
            "update_id": manifest.digest,
            "contributor": manifest.contributor,
            "server_round": submission.server_round,
            "message_id": submission.message_id,
            "manifest": submission.manifest_json,
            "signature": submission.signature,
            "nonce": manifest.nonce,
            "delta_sha256": manifest.delta_sha256,
            "delta_bytes": manifest.delta_bytes,
            "norm": norm,
            "verdict": "admitted" if refusal is None else "refused",
            "code": "" if refusal is None else refusal.code.value,
            "reason": "" if refusal is None else refusal.message,
            "received_at": self._clock(),
            "committed_at": committed_at(tx, submission.contributor, manifest.delta_sha256),
        }
        entry = self._append_entry(tx, submission, manifest, refusal, record_of(row))
        tx.execute(updates.insert().values(**row, ledger_sequence=entry.sequence))

    def _count_refused(self, tx: Connection, submission: UpdateSubmission, error: GymError) -> None:
        """Record a contributor's first refusal in a round in the ledger; count later ones for the summary."""
        if count_refusal(tx, submission.contributor, submission.server_round, error.code) == 1:
            self._append_entry(tx, submission, None, error)

    def _append_entry(
        self,
        tx: Connection,
        submission: UpdateSubmission,
        manifest: UpdateManifest | None,
        refusal: GymError | None,
        record: str = "",
    ) -> Entry:
        verdict = "admitted" if refusal is None else "refused"
        code, reason = ("", "") if refusal is None else (refusal.code.value, refusal.message)
        if self._ledger.private and manifest is not None:
            sealed = seal(submission.manifest_json, verdict, code, reason)
            hidden = {"server_round": submission.server_round, "seal": sealed, "record": record}
            return self._ledger.append(tx, SEALED, hidden)
        body: dict[str, Any] = {
            "contributor": submission.contributor,
            "server_round": submission.server_round,
            "verdict": verdict,
            "reason": "" if refusal is None else f"{code}: {reason}",
        }
        if self._ledger.private and refusal is not None:
            body["reason"] = ErrorCode.UPDATE_REFUSED.value  # one code for all reasons reveals nothing
        if manifest is not None:
            body["update"] = manifest.digest
            body["delta"] = manifest.delta_sha256
            body["record"] = record
        return self._ledger.append(tx, "verdict", body)
