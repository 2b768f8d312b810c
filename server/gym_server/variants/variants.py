"""Personal variants on the hub, uploaded by their owner and readable by accounts that the owner selects.

Everything except the bytes of an upload is checked before the transfer, and again in the transaction that writes it.
The bytes are checked in between. The ledger records uploads and removals by the digest of the signed document, which
cannot be guessed because it contains a signature. Names and readers are shown only to those who may read the variant.
"""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection, delete, select, update

from gym_fed.config.hub.server import ServerConfig
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.core.failpoints import failpoint
from gym_fed.delta.base import BaseSpec
from gym_fed.trust.identity.variant import SignedVariant, VariantManifest
from gym_server.accounts.keys import REVOKED
from gym_server.ledger.chain import Ledger
from gym_server.store.database import Database, rerun
from gym_server.store.objects import ObjectStore
from gym_server.store.rights import give_up, may_read, readable
from gym_server.store.tables import (
    account_keys,
    updates,
    variant_readers,
    variant_takedowns,
    variants,
)
from gym_server.variants.checks import EVERYONE, VariantChecks, row_of

PAGE = 100


@dataclass(frozen=True)
class HeldVariant:
    """A stored variant as shown to its readers; ``readers`` is only for its owner and the coordinator."""

    signed: SignedVariant
    document: str
    base: str
    key_status: str
    ledger_sequence: int
    put_at: float
    readers: tuple[str, ...]


class HubVariants:
    """The variants of one hub.

    Args:
        database: The hub's database.
        ledger: Ledger that records every upload and removal.
        store: Object store with the deltas.
        base: The hub's base model.
        config: The hub's config, with the limits.
        clock: Clock, Unix seconds; tests pass their own.
    """

    def __init__(
        self,
        database: Database,
        ledger: Ledger,
        store: ObjectStore,
        base: BaseSpec,
        config: ServerConfig,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._database = database
        self._ledger = ledger
        self._is_enabled = config.variants.enabled
        self._clock = clock
        self.checks = VariantChecks(store, base, config, clock)

    # ---- changes ----

    @rerun
    def put(self, caller: str, document: str, names: Sequence[str] | None) -> dict[str, Any] | None:
        """Store a variant or a new revision; a repeated call returns the first receipt and sets the given readers.

        Args:
            caller: Id of the authenticated account.
            document: A ``SignedVariant`` as JSON.
            names: Accounts that may read it in addition to the owner, ``*`` for everyone enrolled; None keeps the
                current readers.

        Returns:
            The receipt; None if the delta must be uploaded first.

        Raises:
            GymError: ``PERMISSION_DENIED`` for another owner's name, a hub without variants, or a variant that was
                taken down; ``SIGNATURE_INVALID``, ``KEY_REVOKED``, ``BASE_MISMATCH``, ``TOO_LARGE`` over a limit,
                ``STALE`` for an older revision, ``REPLAYED`` for a used one, ``CLOCK_SKEWED`` for one from the future,
                ``NOT_FOUND`` for an unknown reader, ``DELTA_INVALID``.
        """
        if not self._is_enabled:
            raise GymError(
                ErrorCode.PERMISSION_DENIED,
                "this hub does not store variants",
                "ask its coordinator to set variants.enabled",
            )
        signed = SignedVariant.parse(document)
        signed.verify()
        if signed.manifest.owner != caller:
            raise GymError(
                ErrorCode.PERMISSION_DENIED,
                f"the variant is signed for {signed.manifest.owner}, but was sent by {caller}",
                "only the owner of a variant can upload it",
            )
        with self._database.reading() as tx:
            self.checks.check(tx, signed, names)
            if not may_read(tx, caller, signed.manifest.delta_sha256):
                return None
        self.checks.check_file(signed.manifest)
        with self._database.transaction() as tx:
            if not self.checks.has_file(signed.manifest):
                return None  # gc ran in between and deleted the object, to which nothing referred yet
            if self.checks.check(tx, signed, names):
                self._write(tx, signed)
            if names is not None:
                self._share(tx, signed.manifest, names)
            receipt = self._receipt(tx, caller, signed.manifest.variant)
            failpoint("before-put-variant")
        failpoint("after-put-variant")
        return receipt

    @rerun
    def remove(self, owner: str, name: str, by: str = "owner", reason: str = "") -> dict[str, Any]:
        """Remove a variant and all access to it; a repeated call returns the same answer.

        The delta's file is not deleted here, but only accounts with access to the same bytes for another reason can
        still read it. After a removal by the coordinator, this owner cannot upload the same name, or the same bytes
        under another name, until ``allow``.

        Args:
            owner: Account id of the owner.
            name: Name of the variant.
            by: ``owner`` or ``coordinator``.
            reason: The coordinator's reason.

        Raises:
            GymError: ``NOT_FOUND`` if there is no such variant.
        """
        with self._database.transaction() as tx:
            row = row_of(tx, owner, name)
            if row is None:
                raise _unknown(owner, name)
            if row.document is not None:
                self._drop(tx, row, by, reason)
                if by != "owner":
                    self._hold(tx, row, reason)
            return self._receipt(tx, owner, name)

    @rerun
    def allow(self, owner: str, name: str) -> None:
        """Allow an owner to upload a variant again that the coordinator took down; the variant itself is not restored.

        Raises:
            GymError: ``NOT_FOUND`` if no variant with this name was taken down.
        """
        with self._database.transaction() as tx:
            of = (variant_takedowns.c.owner == owner) & (variant_takedowns.c.name == name)
            if not tx.execute(delete(variant_takedowns).where(of)).rowcount:
                raise GymError(
                    ErrorCode.NOT_FOUND, f"no variant {name[:80]!r} of {owner[:80]} was taken down"
                )

    # ---- reading ----

    def get(self, caller: str, owner: str, name: str) -> HeldVariant:
        """Return a variant that the caller may read.

        Raises:
            GymError: ``NOT_FOUND``, with the same message for a missing variant and for one that the caller may not
                read; ``KEY_REVOKED`` if the key that signed it has been revoked.
        """
        of = (variants.c.owner == (owner or caller)) & (variants.c.name == name)
        with self._database.reading() as tx:
            row = tx.execute(select(variants).where(of, readable(caller))).first()
            if row is None:
                raise _unknown(owner or caller, name)
            found = self._held(tx, row)
        if found.key_status == REVOKED:
            raise GymError(
                ErrorCode.KEY_REVOKED,
                f"variant {name} of {row.owner} is signed by a key that was revoked",
                "its owner can push it again, signed by the new key",
            )
        return found

    def page(self, caller: str | None, after: str = "", size: int = 0) -> tuple[list[HeldVariant], str]:
        """Return variants sorted by owner and name, and the token of the next page (empty after the last).

        Args:
            caller: Account whose own and readable variants are listed; None lists all, for the coordinator.
            after: Token from the previous page.
            size: Maximum number of variants; 0, or more than ``PAGE``, means ``PAGE``.
        """
        most = size if 0 < size < PAGE else PAGE
        owner, _, name = after.partition("/")
        later = (variants.c.owner > owner) | ((variants.c.owner == owner) & (variants.c.name > name))
        shown = variants.c.document.is_not(None) if caller is None else readable(caller)
        order = select(variants).where(later, shown).order_by(variants.c.owner, variants.c.name)
        with self._database.reading() as tx:
            rows = tx.execute(order.limit(most + 1)).all()
            found = [self._held(tx, row) for row in rows[:most]]
        more = len(rows) > most
        return found, f"{rows[most - 1].owner}/{rows[most - 1].name}" if more else ""

    # ---- rows ----

    def _write(self, tx: Connection, signed: SignedVariant) -> None:
        manifest, document = signed.manifest, signed.to_json()
        row = row_of(tx, manifest.owner, manifest.variant)
        slot = row.slot if row is not None else secrets.token_hex(8)
        subject = {"contributor": manifest.owner, "variant": slot, "revision": manifest.revision}
        entry = self._ledger.append(tx, "variant", {**subject, "document": signed.digest})
        values = {
            "revision": manifest.revision,
            "document": document,
            "document_sha256": signed.digest,
            "public_key": signed.public_key,
            "delta_sha256": manifest.delta_sha256,
            "size_bytes": manifest.size_bytes,
            "base_digest": manifest.base_digest,
            "ledger_sequence": entry.sequence,
            "put_at": self._clock(),
        }
        key = {"owner": manifest.owner, "name": manifest.variant, "slot": slot}
        if row is None:
            tx.execute(variants.insert().values(**key, **values))
            return
        tx.execute(update(variants).where(variants.c.slot == slot).values(**values))
        self._forget_upload(tx, manifest.owner, row.delta_sha256)

    def _share(self, tx: Connection, manifest: VariantManifest, names: Sequence[str]) -> None:
        of = {"owner": manifest.owner, "name": manifest.variant}
        _unshare(tx, **of)
        new_readers = [EVERYONE] if EVERYONE in names else sorted(set(names) - {manifest.owner})
        if new_readers:
            tx.execute(variant_readers.insert(), [{**of, "reader": name} for name in new_readers])

    def _drop(self, tx: Connection, row: Any, by: str, reason: str) -> None:
        subject = {"contributor": row.owner, "variant": row.slot, "revision": row.revision}
        body = {**subject, "document": row.document_sha256, "by": by, "reason": reason}
        entry = self._ledger.append(tx, "variant-removed", body)
        gone = {"document": None, "ledger_sequence": entry.sequence, "put_at": self._clock()}
        tx.execute(update(variants).where(variants.c.slot == row.slot).values(**gone))
        _unshare(tx, row.owner, row.name)
        self._forget_upload(tx, row.owner, row.delta_sha256)

    def _hold(self, tx: Connection, row: Any, reason: str) -> None:
        held = {"owner": row.owner, "name": row.name, "delta_sha256": row.delta_sha256}
        same = [variant_takedowns.c[column] == value for column, value in held.items()]
        tx.execute(delete(variant_takedowns).where(*same))
        tx.execute(variant_takedowns.insert().values(**held, reason=reason))

    def _forget_upload(self, tx: Connection, owner: str, sha256: str) -> None:
        """Revoke the access granted by an upload, unless an update or another variant of the owner needs the object."""
        kept = variants.c.document.is_not(None) & (variants.c.owner == owner)
        held = select(variants.c.name).where(kept, variants.c.delta_sha256 == sha256)
        sent = select(updates.c.update_id).where(
            updates.c.contributor == owner, updates.c.delta_sha256 == sha256
        )
        if tx.execute(held.limit(1)).first() is None and tx.execute(sent.limit(1)).first() is None:
            give_up(tx, owner, sha256)

    def _held(self, tx: Connection, row: Any) -> HeldVariant:
        of = (variant_readers.c.owner == row.owner) & (variant_readers.c.name == row.name)
        named = tx.scalars(select(variant_readers.c.reader).where(of).order_by(variant_readers.c.reader))
        status = select(account_keys.c.status).where(account_keys.c.public_key == row.public_key)
        return HeldVariant(
            SignedVariant.parse(row.document),
            row.document,
            self.checks.base_of(tx, row.base_digest),
            str(tx.scalar(status)),
            row.ledger_sequence,
            row.put_at,
            tuple(named),
        )

    def _receipt(self, tx: Connection, owner: str, name: str) -> dict[str, Any]:
        row = row_of(tx, owner, name)
        proof = self._ledger.receipt(tx, row.ledger_sequence)
        return {
            "variant": name,
            "owner": owner,
            "revision": row.revision,
            "document": row.document_sha256,
            "held": row.document is not None,
            "proof": proof.to_dict(),
        }


def _unshare(tx: Connection, owner: str, name: str) -> None:
    of = (variant_readers.c.owner == owner) & (variant_readers.c.name == name)
    tx.execute(delete(variant_readers).where(of))


def _unknown(owner: str, name: str) -> GymError:
    return GymError(
        ErrorCode.NOT_FOUND, f"no variant {json.dumps(name[:80])} of {owner[:80]} that you may read"
    )
