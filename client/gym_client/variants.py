"""Push, pull, list and remove personal variants on a hub."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gym_client.hub.heads import Heads
from gym_client.hub.replies import parse_variant_receipt
from gym_client.hub.transfers import ObjectCache, download, upload
from gym_client.hub.transport import HubClient
from gym_client.identity.home import Home
from gym_client.identity.pins import key_for
from gym_client.ledger.copy import check_variant
from gym_client.ledger.receipts import check_receipt, kept_receipts
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.core.files import file_sha256, make_folder
from gym_fed.trust.identity.variant import SignedVariant, VariantManifest
from gym_fed.trust.ledger.heads import EntryProof
from gym_fed.trust.wire.v1 import hub_pb2 as pb

Progress = Callable[[str, int, int], None]
"""Called with the phase (``upload``, ``fetch`` or ``ledger``) and the done and total amounts."""

_TRIES = 3
_MAX_PAGES = 1000


@dataclass(frozen=True)
class HubVariant:
    """A variant, as reported by the hub.

    Attributes:
        signed: The manifest, signed by the owner.
        base: The hub's model that the variant belongs to: ``base``, or ``version N``.
        key_status: Current status of the signing key: active, rotated or revoked.
        put_at: Time of the push in Unix seconds.
        is_public: True if all enrolled contributors may read the variant.
        num_readers: Number of other readers; reported only to the owner.
        readers: Ids of the readers; only known if a single variant was requested.
    """

    signed: SignedVariant
    base: str
    key_status: str
    put_at: float
    is_public: bool
    num_readers: int
    readers: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        """Convert to a JSON-compatible dictionary."""
        return {
            **self.signed.manifest.model_dump(mode="json"),
            "base": self.base,
            "key_status": self.key_status,
            "put_at": self.put_at,
            "is_public": self.is_public,
            "num_readers": self.num_readers,
        }


@dataclass(frozen=True)
class PulledVariant:
    """A fetched and verified variant: its file, the manifest signed by the owner, and its ledger entry."""

    path: Path
    signed: SignedVariant
    ledger_sequence: int


def sign_variant(client: HubClient, manifest: VariantManifest) -> SignedVariant:
    """Sign a manifest for the account on the hub, with the key that the hub knows for the account."""
    issued_at = int(client.now("PutVariant"))
    own = manifest.model_copy(update={"owner": client.pin.contributor, "issued_at": issued_at})
    return SignedVariant.sign(own, key_for(client.home, client.pin))


def to_push(
    client: HubClient, manifest: VariantManifest, signed: SignedVariant | None = None
) -> SignedVariant:
    """Return the signed manifest to push: an earlier one if its key is still current, the hub's copy, or a new one.

    The hub's copy is used if its manifest is equal, so that an interrupted push can be repeated.

    Args:
        client: Client of the hub.
        manifest: The manifest; its owner is replaced with the account on the hub.
        signed: The manifest signed earlier; None if there is none.
    """
    present = key_for(client.home, client.pin).public_key
    owner = client.pin.contributor
    if signed is not None and (signed.manifest.owner, signed.public_key) == (owner, present):
        return signed
    current = held_variant(client, manifest.variant)
    if current is not None and current.public_key == present and _same(current.manifest, manifest):
        return current
    return sign_variant(client, manifest)


def held_variant(client: HubClient, name: str) -> SignedVariant | None:
    """Return the hub's copy of the account's variant with this name; None if there is no valid one."""
    try:
        return get_variant(client, "", name).signed
    except GymError as error:
        if error.code in (ErrorCode.NOT_FOUND, ErrorCode.KEY_REVOKED):
            return None
        raise


def push_variant(
    client: HubClient,
    delta: Path,
    signed: SignedVariant,
    readers: Sequence[str] | None = None,
    progress: Progress = lambda phase, done, total: None,
    should_stop: Callable[[], bool] = lambda: False,
) -> dict[str, Any]:
    """Upload a variant to the hub. Call again to resume.

    Args:
        client: Client of the hub.
        delta: The file that the manifest refers to.
        signed: The manifest, signed by the account on the hub.
        readers: Ids of other accounts that may read it, ``*`` for everyone enrolled; None leaves them unchanged.
        progress: Called with the upload's progress.
        should_stop: Checked between chunks.

    Returns:
        The hub's receipt, which is verified and stored in the home.

    Raises:
        GymError: ``HASH_MISMATCH`` if the file does not match the manifest; errors from the hub, before the upload;
            ``INTERRUPTED``; ``SIGNATURE_INVALID`` if the receipt is not signed with the hub's ledger key.
    """
    manifest = signed.manifest
    if (digest := file_sha256(delta)) != manifest.delta_sha256:
        raise GymError(
            ErrorCode.HASH_MISMATCH,
            f"{delta} has sha256 {digest}, but the manifest of {manifest.variant} has {manifest.delta_sha256}",
            "push the file that was signed",
        )
    allowed = None if readers is None else pb.Readers(contributors=readers)
    request = pb.PutVariantRequest(variant_json=signed.to_json(), readers=allowed)
    for _ in range(_TRIES):
        reply = client.call("PutVariant", request)
        if not reply.needs_object:
            return _keep(client, reply.receipt_json, manifest.variant, signed)
        upload(
            client,
            manifest.delta_sha256,
            delta,
            lambda done, total: progress("upload", done, total),
            should_stop,
        )
    raise GymError(
        ErrorCode.INTERNAL,
        f"{client.address} still lacks the delta of {manifest.variant} after {_TRIES} uploads",
        "try again; if it continues, report it to the coordinator",
    )


def get_variant(client: HubClient, owner: str, name: str) -> HubVariant:
    """Request a variant and verify its signature and name.

    Args:
        client: Client of the hub.
        owner: Id of the owner's account; empty for one's own.
        name: Name of the variant.

    Raises:
        GymError: ``NOT_FOUND``, ``KEY_REVOKED``, ``SIGNATURE_INVALID``.
    """
    variant = _read(client.call("GetVariant", pb.GetVariantRequest(owner=owner, name=name)))
    variant.signed.verify()
    manifest, expected_owner = variant.signed.manifest, owner or client.pin.contributor
    if (manifest.owner, manifest.variant) != (expected_owner, name):
        raise GymError(
            ErrorCode.SIGNATURE_INVALID,
            f"{client.address} sent {manifest.variant} of {manifest.owner} instead of {name} of {expected_owner}",
            "do not trust this hub; ask its coordinator",
        )
    return variant


def pull_variant(
    client: HubClient,
    owner: str,
    name: str,
    folder: Path,
    progress: Progress = lambda phase, done, total: None,
    should_stop: Callable[[], bool] = lambda: False,
    local: Path | None = None,
) -> PulledVariant:
    """Download and verify a variant. Call again to resume.

    The owner must have signed the variant with a key that the hub's ledger assigns to the owner and that is not
    revoked, and it must be the newest revision in the ledger. The file must match its SHA-256 and the variant's base,
    and be a valid delta.

    Args:
        client: Client of the hub.
        owner: Id of the owner's account; empty for one's own.
        name: Name of the variant.
        folder: Folder for the file, which is named by its SHA-256.
        progress: Called with the progress of the ledger and the download.
        should_stop: Checked between chunks.
        local: A local file that is used in place of a download if its digest matches.

    Raises:
        GymError: Errors from ``get_variant``, ``check_variant`` and ``download``; ``DELTA_INVALID``, ``BASE_MISMATCH``.
    """
    variant = get_variant(client, owner, name)
    sequence = check_variant(client, variant.signed, lambda done, total: progress("ledger", done, total))
    manifest = variant.signed.manifest
    if local is not None and local.is_file() and file_sha256(local) == manifest.delta_sha256:
        path = local
    else:
        make_folder(folder)
        path = download(
            client,
            ObjectCache(folder),
            manifest.delta_sha256,
            manifest.size_bytes,
            lambda done, total: progress("fetch", done, total),
            should_stop,
        )
    _check_file(path, manifest)
    return PulledVariant(path, variant.signed, sequence)


def list_variants(client: HubClient) -> Iterator[HubVariant]:
    """List the account's own variants and those that it may read, by owner and name."""
    return map(_read, _pages(client))


def list_public(client: HubClient) -> Iterator[tuple[pb.VariantInfo, SignedVariant]]:
    """List the public variants, each as the hub's message and the manifest that its owner has signed."""
    return ((info, _read(info).signed) for info in _pages(client) if info.is_public)


def _pages(client: HubClient) -> Iterator[pb.VariantInfo]:
    page = ""
    for _ in range(_MAX_PAGES):
        reply = client.call("ListVariants", pb.ListVariantsRequest(page=page))
        yield from reply.variants
        if not reply.next_page:
            return
        page = reply.next_page
    raise GymError(
        ErrorCode.TOO_LARGE,
        f"{client.address} lists variants on more than {_MAX_PAGES:,} pages",
        "the hub is faulty or malicious: report it to the coordinator",
    )


def remove_variant(client: HubClient, name: str) -> dict[str, Any]:
    """Remove one of the account's variants from the hub.

    Returns:
        The hub's receipt, which is verified and stored in the home.

    Raises:
        GymError: ``NOT_FOUND``; ``SIGNATURE_INVALID`` if the receipt is not signed with the hub's ledger key, or is for
            another variant.
    """
    reply = client.call("DeleteVariant", pb.DeleteVariantRequest(name=name))
    return _keep(client, reply.receipt_json, name, None)


def known_slots(home: Home, server: str) -> dict[str, str]:
    """Return the names of this home's variants by their slot in a hub's ledger, according to stored receipts.

    The ledger contains no variant names; only the receipt of a push links an entry to a name.
    """
    names: dict[str, str] = {}
    for receipt in kept_receipts(home, server):
        if "proof" in receipt and isinstance(name := receipt.get("variant"), str):
            entry = EntryProof.from_dict(receipt["proof"]).entry
            if entry.kind == "variant":
                names[str(entry.body["variant"])] = name
    return names


def _require_slot(client: HubClient, proof: EntryProof, name: str) -> None:
    """Reject a removal proof if this home knows the removed variant under a different name."""
    slots, slot = known_slots(client.home, client.pin.server), str(proof.entry.body.get("variant"))
    if slots.get(slot, name) != name or (name in slots.values() and slot not in slots):
        raise GymError(
            ErrorCode.SIGNATURE_INVALID,
            f"{client.address} proves entry {proof.entry.sequence}, which does not belong to variant {name}",
            "do not trust this hub; ask its coordinator",
        )


def _keep(client: HubClient, text: str, name: str, signed: SignedVariant | None) -> dict[str, Any]:
    receipt = parse_variant_receipt(text)
    proof = check_receipt({"proof": receipt.get("proof")}, bytes.fromhex(client.pin.ledger_key))
    assert proof is not None
    document = receipt.get("document") if signed is None else signed.digest
    body, kind = proof.entry.body, "variant-removed" if signed is None else "variant"
    if (proof.entry.kind, body.get("contributor"), body.get("document")) != (
        kind,
        client.pin.contributor,
        document,
    ):
        raise GymError(
            ErrorCode.SIGNATURE_INVALID,
            f"{client.address} proves entry {proof.entry.sequence}, which does not record this variant",
            "do not trust this hub; ask its coordinator",
        )
    if signed is None:
        _require_slot(client, proof, name)
    heads = Heads(client.home, bytes.fromhex(client.pin.ledger_key))
    heads.see(proof.head, client.prove)
    client.home.append_receipt({**receipt, "server": client.pin.server})
    return receipt


def _read(info: pb.VariantInfo) -> HubVariant:
    return HubVariant(
        SignedVariant.parse(info.variant_json),
        info.base,
        info.key_status,
        info.put_at_seconds,
        info.is_public,
        info.num_readers,
        tuple(info.readers),
    )


def _same(first: VariantManifest, other: VariantManifest) -> bool:
    """Return True if two manifests are equal except for the owner and the time."""
    ignored = {"owner", "issued_at"}
    return first.model_dump(exclude=ignored) == other.model_dump(exclude=ignored)


def _check_file(path: Path, manifest: VariantManifest) -> None:
    from gym_fed.delta.file import DeltaFile

    with DeltaFile.open(path) as delta:
        base = delta.manifest.base_digest
    if base != manifest.base_digest:
        raise GymError(
            ErrorCode.BASE_MISMATCH,
            f"the delta of {manifest.variant} is for base {base}, but its manifest says {manifest.base_digest}",
            "its owner must push it again",
        )
