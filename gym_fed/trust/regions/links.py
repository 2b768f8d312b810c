"""The links between the ledgers of a regional hub and its root, and their verification.

The region's ledger has a ``root-version`` entry for each version of the root from which it started, and a
``root-update`` entry, with the root's signed receipt, for each update that it sent.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.trust.identity.keys import server_id
from gym_fed.trust.identity.manifest import UpdateManifest
from gym_fed.trust.ledger.entries import SEALED, Entry, corrupt, seal
from gym_fed.trust.ledger.heads import EntryProof
from gym_fed.trust.ledger.lineage import VERSION

ROOT_VERSION, ROOT_UPDATE = "root-version", "root-update"


def receipt_proof(receipt: Mapping[str, Any], public_key: bytes) -> EntryProof:
    """Return the proof in a receipt of an update, after verifying it.

    Raises:
        GymError: ``SIGNATURE_INVALID`` if the hub with this key did not sign it, or if its entry belongs to another
            update.
    """
    try:
        proof = EntryProof.from_dict(receipt.get("proof"))
        proof.verify(public_key)
    except GymError as error:
        raise GymError(ErrorCode.SIGNATURE_INVALID, f"invalid receipt: {error.message}") from error
    if not _is_of(proof, receipt):
        update = str(receipt.get("update"))[:12]
        raise GymError(
            ErrorCode.SIGNATURE_INVALID, f"the receipt of update {update} proves the entry of a different one"
        )
    return proof


def _is_of(proof: EntryProof, receipt: Mapping[str, Any]) -> bool:
    """Return True if the entry is the verdict that the receipt is for; entries of private rounds are sealed."""
    body = proof.entry.body
    if proof.entry.kind != SEALED:
        recorded = (proof.entry.kind, body.get("update"), body.get("verdict"))
        return recorded == ("verdict", receipt.get("update"), receipt.get("verdict"))
    manifest, verdict, code, reason = (
        str(receipt.get(key, "")) for key in ("manifest", "verdict", "code", "reason")
    )
    try:
        same = UpdateManifest.parse(manifest).digest == receipt.get("update")
    except GymError:
        return False
    return same and seal(manifest, verdict, code, reason) == body.get("seal")


def _check_version(body: Mapping[str, Any]) -> None:
    """Raise ``ValueError`` unless the body has the fields that ``RegionLinks.compare`` reads."""
    for name in ("root", "version", "base"):
        if not isinstance(body.get(name), str):
            raise ValueError(f"{name} is not a string")
    if type(body.get("root_size")) is not int:
        raise ValueError("root_size is not an integer")
    integers = body.get("integers")
    is_base = body["version"] == body["base"]  # only the base has no sum
    if not isinstance(integers, str) and not (is_base and integers is None):
        raise ValueError("integers is not a string")


@dataclass(frozen=True)
class LinkCounts:
    """Counts of the verified links.

    Attributes:
        versions: Number of versions of the root from which the region started.
        updates: Number of updates whose receipts are in the region's ledger and whose verdicts are in the root's.
        later: Number of links to entries after the end of the root's export, which cannot prove them.
    """

    versions: int
    updates: int
    later: int


class RegionLinks:
    """Collects the links in a region's ledger, and then compares them with the root's ledger."""

    def __init__(self) -> None:
        self._versions: list[tuple[int, Mapping[str, Any]]] = []
        self._proofs: list[tuple[int, EntryProof]] = []

    def add(self, entry: Entry, body: Mapping[str, Any]) -> None:
        """Process the next entry of the region's ledger.

        Raises:
            GymError: ``STATE_CORRUPT`` for a malformed link; ``SIGNATURE_INVALID`` for a receipt that the root did not
                sign.
        """
        if entry.kind not in (ROOT_VERSION, ROOT_UPDATE):
            return
        try:
            key = bytes.fromhex(body["root_key"])
            if server_id(key) != body["root"]:
                raise ValueError("root is not the id of root_key")
            if entry.kind == ROOT_VERSION:
                _check_version(body)
                self._versions.append((entry.sequence, body))
            else:
                self._proofs.append((entry.sequence, receipt_proof(body["receipt"], key)))
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise corrupt(f"entry {entry.sequence} ({entry.kind}) is malformed: {error!r:.80}") from error

    def compare(self, root: str, entries: Iterable[Entry]) -> LinkCounts:
        """Compare the links to one root with the verified entries of its ledger.

        Args:
            root: Id of the root.
            entries: All entries of the root's ledger, in order.

        Raises:
            GymError: ``STATE_CORRUPT`` with the region's entry that contradicts the root's ledger.
        """
        hashes, sums = dict[int, str](), dict[str, str]()
        for entry in entries:
            hashes[entry.sequence] = entry.hash
            if entry.kind == VERSION and "integers" in entry.body:
                sums[entry.body["digest"]] = entry.body["integers"]["digest"]
        size, later, updates, versions = len(hashes), 0, 0, 0
        for number, proof in self._proofs:
            if proof.head.head.server != root:
                continue
            if proof.entry.sequence > size:
                later += 1
            elif hashes[proof.entry.sequence] != proof.entry.hash:
                raise corrupt(
                    f"entry {number}: the root's ledger has a different entry {proof.entry.sequence}"
                )
            else:
                updates += 1
        for number, body in self._versions:
            if body["root"] != root:
                continue
            is_base = body["version"] == body["base"]
            if is_base or sums.get(body["version"]) == body["integers"]:
                versions += 1
            elif body["root_size"] > size and body["version"] not in sums:
                later += 1
            else:
                raise corrupt(
                    f"entry {number}: the root's ledger has no version {body['version']} with this sum"
                )
        return LinkCounts(versions, updates, later)
