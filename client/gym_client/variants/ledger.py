"""What a hub's signed ledger says of a variant: that its owner put it, by which key, and that nothing newer was put."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from gym_client.hub.transport import HubClient
from gym_client.ledger.copy import LedgerCopy
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.trust.identity.history import REVOKED, History
from gym_fed.trust.identity.variant import SignedVariant
from gym_fed.trust.ledger.entries import Entry
from gym_fed.trust.ledger.export import verify_file

_HINT = "do not use it; ask its owner, and the hub's coordinator"


def check_said(
    client: HubClient, signed: SignedVariant, progress: Callable[[int, int], None] = lambda done, total: None
) -> int:
    """Bring the own copy of the ledger up to date, check all of it, and hold a variant against it.

    Returns:
        Sequence number of the entry that records the variant.

    Raises:
        GymError: ``SIGNATURE_INVALID`` when the ledger does not say that the owner put it with this key;
            ``KEY_REVOKED``; ``STALE`` when something newer took its place; what the check of the ledger raises.
    """
    client.status()
    key = bytes.fromhex(client.pin.ledger_key)
    copy = LedgerCopy(client.home, key)
    copy.sync(client, progress)
    said = Said(client.pin.server, signed)
    verify_file(copy.path, key, said)
    return said.checked()


class Said:
    """Shown every entry of a ledger in order, it knows what the ledger says of one variant.

    Args:
        server: Id of the hub.
        signed: The variant.
    """

    def __init__(self, server: str, signed: SignedVariant) -> None:
        self._history = History(server)
        self._signed = signed
        self._digest = signed.digest
        self._slot = ""
        self._at = 0
        self._later = 0
        self._was_owners = False

    def __call__(self, entry: Entry, body: dict[str, Any]) -> None:
        """The next entry."""
        self._history.add(entry.kind, body)
        owner = self._signed.manifest.owner
        if entry.kind not in ("variant", "variant-removed") or body["contributor"] != owner:
            return
        if entry.kind == "variant" and body["document"] == self._digest:
            self._slot, self._at = body["variant"], entry.sequence
            self._was_owners = self._history.current(owner) == self._signed.public_key
        elif body["variant"] == self._slot:
            self._later = entry.sequence

    def checked(self) -> int:
        """The entry's sequence number, when there is nothing against the variant; raises as ``check_said``."""
        manifest = self._signed.manifest
        what = f"variant {manifest.variant} of {manifest.owner}"
        if not self._at:
            raise GymError(
                ErrorCode.SIGNATURE_INVALID,
                f"the hub's ledger does not record {what}, as it is signed",
                _HINT,
            )
        if not self._was_owners:
            raise GymError(
                ErrorCode.SIGNATURE_INVALID,
                f"{what} is signed by a key that was not the owner's at entry {self._at} of the hub's ledger",
                _HINT,
            )
        if self._history.keys[self._signed.public_key.hex()].status == REVOKED:
            raise GymError(
                ErrorCode.KEY_REVOKED,
                f"the key that signed {what} was revoked",
                "its owner can push it again, signed by the new key",
            )
        if self._later:
            raise GymError(
                ErrorCode.STALE,
                f"{what}, revision {manifest.revision}, was replaced or removed by entry {self._later}",
                "pull it again",
            )
        return self._at
