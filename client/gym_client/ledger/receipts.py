"""Receipts prove, without contacting the hub, that an update was admitted, judged and credited.

A receipt contains a ledger entry under a signed head. The receipt of a submission contains the verdict at admission;
receipts of later verdicts and credits are fetched when the hub reports them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

from gym_client.hub.backoff import may_pass
from gym_client.hub.heads import Heads
from gym_client.hub.replies import NOT_ITS_OWN, refused_as_unsigned
from gym_client.hub.transport import HubClient
from gym_client.identity.home import Home
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.core.text import plain
from gym_fed.trust.identity.manifest import UpdateManifest
from gym_fed.trust.ledger.entries import SEALED, seal
from gym_fed.trust.ledger.fields import check_fields
from gym_fed.trust.ledger.heads import EntryProof

_SHA256 = re.compile(r"[0-9a-f]{64}")


class Receipts:
    """The receipts of one hub.

    Args:
        home: The contributor's home.
        client: Client of the hub.
    """

    def __init__(self, home: Home, client: HubClient) -> None:
        self._home = home
        self._client = client

    def check(self, receipt: dict[str, Any]) -> None:
        """Verify a submission's receipt and record its head.

        Raises:
            GymError: ``SIGNATURE_INVALID`` if the hub did not sign it, ``LEDGER_FORKED``.
        """
        if "update" in receipt or "proof" in receipt:
            self._see(check_receipt(receipt, self._key()))

    def fetch(self, verdicts: Sequence[dict[str, Any]]) -> int:
        """Fetch and store the receipts of judged updates.

        Args:
            verdicts: The verdicts of ``AccountReply.verdicts_json``, each with its ledger entries under ``entries``.

        Returns:
            The number of new receipts. If the hub is unreachable or fails, the missing ones are fetched next time.

        Raises:
            GymError: ``SIGNATURE_INVALID``; ``LEDGER_FORKED``; the hub's error if it refuses to prove an entry that it
                reported.
        """
        reported = {int(number) for verdict in verdicts for number in verdict.get("entries", ())}
        missing = sorted(reported - self._sequences()) if reported else []
        for done, sequence in enumerate(missing):
            try:
                proof = self._client.prove(sequence)
            except GymError as error:
                if may_pass(error):
                    return done
                raise
            self._keep(proof, sequence)
        return len(missing)

    def _keep(self, proof: EntryProof, sequence: int) -> None:
        key, server = self._key(), self._client.pin.server
        with refused_as_unsigned(NOT_ITS_OWN):
            proof.verify(key)
            check_fields(proof.entry, proof.entry.body)
        if proof.entry.sequence != sequence:
            raise GymError(
                ErrorCode.SIGNATURE_INVALID, f"{server} proves entry {proof.entry.sequence}, not {sequence}"
            )
        self._see(proof)
        self._home.append_receipt({"server": server, "entry": sequence, "proof": proof.to_dict()})

    def _see(self, proof: EntryProof) -> None:
        heads = Heads(self._home, self._key())
        heads.see(proof.head, self._client.prove, statements=self._client.statements)

    def _sequences(self) -> set[int]:
        receipts = kept_receipts(self._home, self._client.pin.server)
        return {receipt["proof"]["entry"]["sequence"] for receipt in receipts if "proof" in receipt}

    def _key(self) -> bytes:
        return bytes.fromhex(self._client.pin.ledger_key)


def kept_receipts(home: Home, server: str) -> list[dict[str, Any]]:
    """List the receipts from a hub, oldest first, without those superseded by an accepted restore."""
    receipts: list[dict[str, Any]] = []
    for receipt in home.receipts():
        if receipt.get("server") != server or "commitment" in receipt:  # a commitment proves no entry
            continue
        if "restored" in receipt:
            last = int(receipt["restored"]["statement"]["restored_at_entry"])
            receipts = [old for old in receipts if (sequence_of(old) or 0) <= last]
        else:
            receipts.append(receipt)
    return receipts


def sequence_of(receipt: dict[str, Any]) -> int | None:
    """Return the sequence number of the entry that a stored receipt proves; None if it proves none."""
    return int(receipt["proof"]["entry"]["sequence"]) if "proof" in receipt else None


def check_receipt(receipt: dict[str, Any], key: bytes) -> EntryProof:
    """Verify a stored receipt, given only the hub's key.

    Returns:
        The proof in the receipt.

    Raises:
        GymError: ``SIGNATURE_INVALID``.
    """
    try:
        proof = EntryProof.from_dict(receipt.get("proof"))
    except GymError as error:
        raise GymError(ErrorCode.SIGNATURE_INVALID, f"a receipt: {error.message}") from error
    with refused_as_unsigned(NOT_ITS_OWN):
        proof.verify(key)
        check_fields(proof.entry, proof.entry.body)
    body = proof.entry.body
    if "update" in receipt and not _SHA256.fullmatch(str(receipt["update"])):  # becomes part of file names
        raise GymError(
            ErrorCode.SIGNATURE_INVALID,
            f"a receipt is for update {plain(receipt['update'], 80)!r}, which is not a digest",
        )
    if "update" in receipt and not _is_of(proof, receipt):
        raise GymError(
            ErrorCode.SIGNATURE_INVALID,
            f"the receipt of update {str(receipt['update'])[:12]} says {receipt.get('verdict')!r}, but "
            f"its ledger entry is {json.dumps(body, sort_keys=True)[:200]}",
        )
    return proof


def _is_of(proof: EntryProof, receipt: dict[str, Any]) -> bool:
    """Return True if the proven entry matches the receipt; entries of private rounds are sealed."""
    body, kind = proof.entry.body, proof.entry.kind
    if kind != SEALED:
        recorded = (kind, body.get("update"), body.get("verdict"))
        return recorded == ("verdict", receipt["update"], receipt.get("verdict"))
    manifest, verdict, code, reason = (
        str(receipt.get(key, "")) for key in ("manifest", "verdict", "code", "reason")
    )
    try:
        same = UpdateManifest.parse(manifest).digest == receipt["update"]
    except GymError:
        return False
    return same and seal(manifest, verdict, code, reason) == body.get("seal")
