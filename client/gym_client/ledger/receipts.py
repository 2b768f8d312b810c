"""Receipts: what proves, without the hub and years later, that an update was admitted, judged and credited.

A receipt holds the ledger's entry under a signed head. The one at submission holds the verdict at admission. Those
of the verdict after the merge and of the credits are fetched when the hub reports them.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from gym_client.hub.backoff import is_passing
from gym_client.hub.heads import Heads
from gym_client.hub.replies import NOT_ITS_OWN, refused_as_unsigned
from gym_client.hub.transport import HubClient
from gym_client.identity.home import Home
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.trust.identity.keys import verify_signature
from gym_fed.trust.identity.manifest import UpdateManifest
from gym_fed.trust.ledger.entries import SEALED, seal
from gym_fed.trust.ledger.heads import EntryProof


class Receipts:
    """The receipts of one hub.

    Args:
        home: The contributor's folder.
        client: The hub.
    """

    def __init__(self, home: Home, client: HubClient) -> None:
        self._home = home
        self._client = client

    def check(self, receipt: dict[str, Any]) -> None:
        """Check a receipt of submission, and take up its head.

        Raises:
            GymError: ``SIGNATURE_INVALID`` when the hub did not sign it, ``LEDGER_FORKED``.
        """
        if "update" not in receipt:
            return
        proof = check_receipt(receipt, self._key())
        if proof is not None:
            self._see(proof)

    def fetch(self, verdicts: Sequence[dict[str, Any]]) -> int:
        """Fetch and keep the proofs of what the hub says of updates that were judged.

        Args:
            verdicts: As ``AccountReply.verdicts_json`` has them, with the entries of each under ``entries``.

        Returns:
            How many are new. A hub that is away is asked again the next time.

        Raises:
            GymError: ``SIGNATURE_INVALID``, ``LEDGER_FORKED``, and the hub's refusal of an entry that it reported.
        """
        reported = {int(number) for verdict in verdicts for number in verdict.get("entries", ())}
        missing = sorted(reported - self._sequences()) if reported else []
        for done, sequence in enumerate(missing):
            try:
                proof = self._client.prove(sequence)
            except GymError as error:
                if is_passing(error):
                    return done
                raise
            self._keep(proof, sequence)
        return len(missing)

    def _keep(self, proof: EntryProof, sequence: int) -> None:
        key, server = self._key(), self._client.pin.server
        with refused_as_unsigned(NOT_ITS_OWN):
            proof.verify(key)
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
        kept = kept_receipts(self._home, self._client.pin.server)
        return {found["proof"]["entry"]["sequence"] for found in kept if "proof" in found}

    def _key(self) -> bytes:
        return bytes.fromhex(self._client.pin.ledger_key)


def kept_receipts(home: Home, server: str) -> list[dict[str, Any]]:
    """The receipts of a hub, oldest first, without those that a restore of the hub took, which was accepted."""
    found: list[dict[str, Any]] = []
    for receipt in home.receipts():
        if receipt.get("server") != server or "commitment" in receipt:  # which proves no entry
            continue
        if "restored" in receipt:
            last = int(receipt["restored"]["statement"]["restored_at_entry"])
            found = [old for old in found if (sequence_of(old) or 0) <= last]
        else:
            found.append(receipt)
    return found


def sequence_of(receipt: dict[str, Any]) -> int | None:
    """The ledger's entry that a kept receipt proves; None where it proves none."""
    if "proof" in receipt:
        return int(receipt["proof"]["entry"]["sequence"])
    return int(receipt["ledger_sequence"]) if "ledger_sequence" in receipt else None


def check_receipt(receipt: dict[str, Any], key: bytes) -> EntryProof | None:
    """Check a kept receipt against the hub's key alone.

    Returns:
        The proof in it; None for a receipt of an earlier release, which has the signature of one entry's hash.

    Raises:
        GymError: ``SIGNATURE_INVALID``.
    """
    if "proof" not in receipt:
        try:
            signature = bytes.fromhex(str(receipt.get("ledger_signature", "")))
        except ValueError as error:
            raise GymError(ErrorCode.SIGNATURE_INVALID, "the receipt's signature is not hex") from error
        verify_signature(key, {"ledger": receipt.get("ledger_hash", "")}, signature)
        return None
    try:
        proof = EntryProof.from_dict(receipt["proof"])
    except GymError as error:
        raise GymError(ErrorCode.SIGNATURE_INVALID, f"a receipt: {error.message}") from error
    with refused_as_unsigned(NOT_ITS_OWN):
        proof.verify(key)
    body = proof.entry.body
    if "update" in receipt and not _is_of(proof, receipt):
        raise GymError(
            ErrorCode.SIGNATURE_INVALID,
            f"the receipt of update {str(receipt['update'])[:12]} says {receipt.get('verdict')!r}, "
            f"its ledger entry {json.dumps(body, sort_keys=True)[:200]}",
        )
    return proof


def _is_of(proof: EntryProof, receipt: dict[str, Any]) -> bool:
    """Whether entry and receipt agree; the entry of a private round is sealed."""
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
