"""Checks before a hub stores a variant: signer, revision, base, limits, readers and file."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

from sqlalchemy import Connection, func, or_, select

from gym_fed.config.hub.server import ServerConfig
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.core.text import counted, readable_seconds
from gym_fed.delta.base import BaseSpec
from gym_fed.trust.identity.keys import CONTRIBUTOR_PATTERN
from gym_fed.trust.identity.statements import CLOCK_SKEW_SECONDS
from gym_fed.trust.identity.variant import SignedVariant, VariantManifest
from gym_server.accounts.keys import REVOKED, ROTATED, RevokedKey, key_row
from gym_server.ledger.pace import require_pace
from gym_server.store.objects import ObjectStore
from gym_server.store.tables import (
    accounts,
    published,
    variant_takedowns,
    variants,
    versions,
)

EVERYONE = "*"
MAX_READERS = 1000
VARIANT_KINDS = ("variant", "variant-removed")
"""Kinds of ledger entries about variants."""
_CONTRIBUTOR = re.compile(CONTRIBUTOR_PATTERN, re.ASCII)


class VariantChecks:
    """Checks variants before they are stored on one hub.

    Args:
        store: Object store with the deltas.
        base: The hub's base model.
        config: The hub's config, with the limits.
        clock: Clock, Unix seconds.
    """

    def __init__(
        self, store: ObjectStore, base: BaseSpec, config: ServerConfig, clock: Callable[[], float]
    ) -> None:
        self._store = store
        self._base = base
        self._config = config.variants
        self._max_bytes = config.max_variant_bytes(base.shapes)
        self._clock = clock

    def check(self, tx: Connection, signed: SignedVariant, names: Sequence[str] | None) -> bool:
        """Check everything except the bytes; return True if there is something to write."""
        manifest = signed.manifest
        self._check_readers(tx, manifest.owner, names or ())
        row = row_of(tx, manifest.owner, manifest.variant)
        if row is not None and row.document is not None and row.document_sha256 == signed.digest:
            return False
        _check_key(tx, signed)
        _check_takedowns(tx, manifest)
        _check_revision(row, manifest)
        ahead = manifest.issued_at - self._clock()
        if ahead > CLOCK_SKEW_SECONDS:
            raise GymError(
                ErrorCode.CLOCK_SKEWED,
                f"the variant's manifest was signed {readable_seconds(ahead)} ahead of the hub's clock",
                "set the clock of the machine that signs, and sign the variant again (gym variant push)",
            )
        self.base_of(tx, manifest.base_digest, refuse=True)
        self._check_room(tx, manifest)
        self._check_pace(tx, manifest.owner)
        return True

    def _check_room(self, tx: Connection, manifest: VariantManifest) -> None:
        size, name = manifest.size_bytes, manifest.variant
        if size > self._max_bytes:
            raise GymError(
                ErrorCode.TOO_LARGE,
                f"variant {name} has {counted(size, 'byte')}; this hub accepts at most {self._max_bytes}",
                "use a smaller codec, or LoRA",
            )
        other = variants.c.document.is_not(None) & ~(
            (variants.c.owner == manifest.owner) & (variants.c.name == name)
        )
        mine = select(func.count(), func.coalesce(func.sum(variants.c.size_bytes), 0))
        count, used = tx.execute(mine.where(other, variants.c.owner == manifest.owner)).one()
        if count >= self._config.max_per_contributor:
            raise GymError(
                ErrorCode.TOO_LARGE,
                f"{manifest.owner} already has {counted(count, 'variant')} on this hub, the limit "
                "(variants.max_per_contributor)",
                "remove one: gym variant hub remove NAME",
            )
        most = self._config.max_bytes_per_contributor
        if used + size > most:
            raise GymError(
                ErrorCode.TOO_LARGE,
                f"{manifest.owner} has {counted(used, 'byte')} in {counted(count, 'variant')} on this hub; the "
                f"{counted(size, 'byte')} of "
                f"{name} would exceed the limit of {most} (variants.max_bytes_per_contributor)",
                "remove one: gym variant hub remove NAME; or use a smaller codec, or LoRA",
            )
        total = int(tx.scalar(select(func.sum(variants.c.size_bytes)).where(other)) or 0)
        if total + size > self._config.max_total_bytes:
            raise GymError(
                ErrorCode.TOO_LARGE,
                f"this hub has no room for another {counted(size, 'byte')} of variants",
                "ask its coordinator to raise variants.max_total_bytes",
            )

    def _check_pace(self, tx: Connection, owner: str) -> None:
        """Check the rate limit on an owner's changes, each of which adds an entry to the ledger."""
        most = self._config.max_changes_per_hour
        require_pace(tx, owner, VARIANT_KINDS, most, self._clock(), "changed its variants")

    def _check_readers(self, tx: Connection, owner: str, names: Sequence[str]) -> None:
        if len(names) > MAX_READERS:
            raise GymError(
                ErrorCode.TOO_LARGE,
                f"{counted(len(names), 'reader')} requested; at most {MAX_READERS} are allowed",
                f"pass fewer, or {EVERYONE!r} for everyone",
            )
        contributors = {name for name in names if name != EVERYONE}
        known = set(
            tx.scalars(select(accounts.c.contributor).where(accounts.c.contributor.in_(contributors)))
        )
        for name in sorted(contributors - known):
            shown = name if _CONTRIBUTOR.fullmatch(name) else repr(name[:80])
            raise GymError(
                ErrorCode.NOT_FOUND,
                f"no contributor {shown} on this hub",
                "pass the readers' ids, from gym-client id",
            )

    def has_file(self, manifest: VariantManifest) -> bool:
        """Return True if the store has the delta."""
        return self._store.has(manifest.delta_sha256)

    def check_file(self, manifest: VariantManifest) -> None:
        """Validate the uploaded delta in the same way as an update's."""
        from gym_fed.delta.file import DeltaFile
        from gym_fed.delta.mapped import DeltaLimits

        path = self._store.local_path(manifest.delta_sha256)
        size = path.stat().st_size
        if size != manifest.size_bytes:
            raise GymError(
                ErrorCode.DELTA_INVALID,
                f"the manifest says {counted(manifest.size_bytes, 'byte')}, but the object has {size}",
            )
        spec = BaseSpec(self._base.model_name, manifest.base_digest, self._base.shapes)
        limits = DeltaLimits(max_file_bytes=self._max_bytes, sums=False)
        DeltaFile.open(path, spec, limits, added_tokens=True).close()

    def base_of(self, tx: Connection, digest: str, refuse: bool = False) -> str:
        """Return which of the hub's models has a digest: ``base``, ``version N`` or ``unknown``.

        With ``refuse``, an unknown digest raises ``BASE_MISMATCH`` instead.
        """
        if digest == self._base.digest:
            return "base"
        for table in (versions, published):
            height = tx.scalar(select(table.c.height).where(table.c.digest == digest))
            if height is not None:
                return f"version {height}"
        if not refuse:
            return "unknown"
        last = tx.execute(select(versions).order_by(versions.c.height.desc()).limit(1)).first()
        newest = f"its newest version is {last.height}, {last.digest}" if last else "it has no version yet"
        raise GymError(
            ErrorCode.BASE_MISMATCH,
            f"the variant is for base {digest}; this hub's base is {self._base.digest}, and {newest}",
            "create the variant on one of these, or on a folder written by `gym-server model`",
        )


def row_of(tx: Connection, owner: str, name: str) -> Any:
    """Return the row of a variant that exists or existed, or None."""
    return tx.execute(select(variants).where(variants.c.owner == owner, variants.c.name == name)).first()


def _check_key(tx: Connection, signed: SignedVariant) -> None:
    """Check that the variant is signed by the account's current key."""
    owner, key = signed.manifest.owner, key_row(tx, signed.public_key)
    if key is None or key.contributor != owner:
        raise GymError(
            ErrorCode.SIGNATURE_INVALID,
            f"the variant is signed by a key that does not belong to {owner}",
            "sign the variant with the key of this account",
        )
    if key.status == REVOKED:
        raise RevokedKey(owner)
    if key.status == ROTATED:
        raise GymError(
            ErrorCode.KEY_REVOKED,
            f"the variant is signed by a key of {owner} that was replaced by another key",
            "sign the variant with the current key",
        )


def _check_takedowns(tx: Connection, manifest: VariantManifest) -> None:
    """Check that the coordinator has not taken down the owner's variant with this name or these bytes."""
    held = variant_takedowns.c
    same = or_(held.name == manifest.variant, held.delta_sha256 == manifest.delta_sha256)
    row = tx.execute(select(held.name, held.reason).where(held.owner == manifest.owner, same)).first()
    if row is not None:
        raise GymError(
            ErrorCode.PERMISSION_DENIED,
            f"variant {row.name} of {manifest.owner} was taken down by this hub's coordinator: {row.reason}",
            "ask the coordinator, who can allow it again",
        )


def _check_revision(row: Any, manifest: VariantManifest) -> None:
    if row is None or manifest.revision > row.revision:
        return
    old = manifest.revision < row.revision
    state = "already exists on this hub" if row.document is not None else "was removed from this hub"
    raise GymError(
        ErrorCode.STALE if old else ErrorCode.REPLAYED,
        f"revision {row.revision} of variant {manifest.variant} {state}; this is revision {manifest.revision}",
        f"sign the variant as revision {row.revision + 1} or higher",
    )
