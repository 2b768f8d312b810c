"""Remove a variant from all hubs that were joined, and verify the hubs' receipts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from gym_client.hub.known import enrolled_client
from gym_client.hub.transport import HubClient
from gym_client.identity.home import Home
from gym_client.identity.pins import ServerPin, with_account
from gym_client.ledger.receipts import check_receipt
from gym_client.variants import known_slots, remove_variant
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.core.text import plain
from gym_fed.serving.store.records import is_account
from gym_fed.trust.identity.variant import HubRemoval, SignedRemoval
from gym_fed.trust.ledger.entries import Entry


def pushed_to(home: Home, name: str) -> list[ServerPin]:
    """List the hubs that still have a variant with this name, according to this home's receipts."""
    held: dict[str, bool] = {}
    for receipt in home.receipts():
        if receipt.get("variant") == name and isinstance(receipt.get("held"), bool):
            held[str(receipt.get("server"))] = receipt["held"]
    return [pin for pin in with_account(home) if held.get(pin.server)]


def remove_everywhere(home: Home, name: str, owner: str | None, insecure: bool) -> Iterator[HubRemoval]:
    """Remove a variant from all hubs, one after another; safe to repeat.

    Args:
        home: The home with the accounts.
        name: Name of the variant.
        owner: Id of the owner's account; hubs where this home has another account are skipped. None to accept any
            account.
        insecure: Use plain text for loopback addresses.

    Raises:
        GymError: For the first hub that is unreachable or refuses; earlier removals remain in effect.
    """
    for pin in with_account(home):
        if not pin.contributor:  # an account that has left cannot make requests
            yield HubRemoval(address=pin.address, server=pin.server, status="not asked")
        elif owner is not None and owner != pin.contributor:
            yield HubRemoval(address=pin.address, server=pin.server, status="another's")
        else:
            try:
                with enrolled_client(home, pin.address, insecure) as client:
                    client.status()
                    yield _removed(client, name)
            except GymError as error:
                message = f"at {pin.address}: {error.message}"
                raise GymError(
                    error.code, message, error.hint or "run the same command again to resume"
                ) from error


def check_hubs(home: Home, signed: SignedRemoval) -> list[dict[str, Any]]:
    """Verify the hubs' receipts with the ledger keys that this home knows.

    Returns:
        One row per hub: ``address``, ``server``, ``status`` and ``proven``. If the hub's entry was checked, also
        ``ledger_sequence`` and ``is_same_document`` (True if the entry is for a revision in the receipt). ``proven``
        requires that, or a receipt in this home that links the entry to the variant.

    Raises:
        GymError: ``SIGNATURE_INVALID`` if the hub did not sign a receipt, or if it is a receipt for something else.
    """
    keys = {pin.server: pin.ledger_key for pin in with_account(home) if pin.ledger_key}
    rows: list[dict[str, Any]] = []
    documents = {revision.document for revision in signed.removal.revisions}
    for hub in signed.removal.hubs:
        row: dict[str, Any] = {"address": hub.address, "server": hub.server, "status": hub.status}
        row["proven"] = False
        if hub.receipt is not None and hub.server in keys:
            entry = _entry(hub, signed.removal.owner, bytes.fromhex(keys[hub.server]))
            row["ledger_sequence"] = entry.sequence
            row["is_same_document"] = entry.body.get("document") in documents
            known = known_slots(home, hub.server).get(str(entry.body.get("variant")))
            row["proven"] = known == signed.removal.variant or (known is None and row["is_same_document"])
        rows.append(row)
    return rows


def _entry(hub: HubRemoval, owner: str, ledger_key: bytes) -> Entry:
    """Verify a hub's receipt and return the ledger entry that it proves.

    Raises:
        GymError: As in ``check_hubs``.
    """
    receipt = hub.receipt or {}
    proof = check_receipt({"proof": receipt.get("proof")}, ledger_key)
    entry = proof.entry
    is_of = entry.body.get("document") == receipt.get("document") and (
        not is_account(owner) or entry.body.get("contributor") == owner
    )
    if hub.status != "removed" or entry.kind != "variant-removed" or not is_of:
        raise GymError(
            ErrorCode.SIGNATURE_INVALID,
            f"entry {entry.sequence} of {plain(hub.address, 80)} does not record the removal of this variant",
        )
    return entry


def _removed(client: HubClient, name: str) -> HubRemoval:
    pin = client.pin
    try:
        receipt = remove_variant(client, name)
    except GymError as error:
        if error.code is not ErrorCode.NOT_FOUND:
            raise
        return HubRemoval(address=pin.address, server=pin.server, status="absent")
    return HubRemoval(address=pin.address, server=pin.server, status="removed", receipt=receipt)
