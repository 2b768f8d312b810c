"""Read access to objects, and the bytes that count against an account's quota.

An object may be read by its uploaders, by the accounts whose task or version refers to it, and by a variant's readers.
A row in ``readers`` also records who uploaded an object. The prefix ``FORMERLY`` marks an uploader who gave up read
access, as for the file of a replaced variant; the object counts against the uploader's quota until it is deleted.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from sqlalchemy import ColumnElement, Connection, and_, delete, func, or_, select

from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.trust.wire.references import references
from gym_fed.trust.wire.v1 import hub_pb2 as pb
from gym_server.store.tables import (
    messages,
    nodes,
    objects,
    readers,
    updates,
    uploads,
    variant_readers,
    variants,
    versions,
)

FORMERLY = "~"
"""Prefix of a contributor's id in ``readers`` if it uploaded the object and may no longer read it."""

_EVERYONE = "*"


@dataclass(frozen=True)
class Usage:
    """The bytes of finished and of declared uploads that count against the quota."""

    finished: int
    declared: int

    @property
    def total(self) -> int:
        """Return the sum, in bytes."""
        return self.finished + self.declared


def usage_of(tx: Connection, contributor: str) -> Usage:
    """Return the bytes that count against an account's quota: its uploads, except those that a needed object refers to.

    An update counts until it is merged, so that refused updates cannot fill the disk.
    """
    mine = select(readers.c.sha256).where(readers.c.contributor.in_((contributor, FORMERLY + contributor)))
    rows = tx.execute(
        select(objects.c.sha256, objects.c.size_bytes).where(
            objects.c.sha256.in_(mine), objects.c.sha256.not_in(_KEPT)
        )
    ).all()
    replied = _in_plain_replies(tx, contributor) if rows else set()
    declared = tx.scalar(select(func.sum(uploads.c.size_bytes)).where(uploads.c.contributor == contributor))
    return Usage(sum(row.size_bytes for row in rows if row.sha256 not in replied), int(declared or 0))


def give_up(tx: Connection, contributor: str, sha256: str) -> None:
    """Revoke a contributor's access to an object that it uploaded; the upload still counts against its quota."""
    of = readers.c.sha256 == sha256
    if tx.execute(delete(readers).where(of, readers.c.contributor == contributor)).rowcount:
        tx.execute(delete(readers).where(of, readers.c.contributor == FORMERLY + contributor))
        tx.execute(readers.insert().values(sha256=sha256, contributor=FORMERLY + contributor))


_KEPT = (
    select(updates.c.delta_sha256)
    .where(updates.c.verdict == "merged")
    .union(
        select(versions.c.soup_sha256),
        select(variants.c.delta_sha256).where(variants.c.document.is_not(None)),
        select(readers.c.sha256).where(readers.c.contributor == _EVERYONE),  # objects that a task refers to
    )
)


def _in_plain_replies(tx: Connection, contributor: str) -> set[str]:
    """Return the objects in an account's replies to other strategies' tasks, which are not updates."""
    replies = select(messages.c.reply).where(
        messages.c.node_id.in_(select(nodes.c.node_id).where(nodes.c.contributor == contributor)),
        messages.c.reply.is_not(None),
        messages.c.message_id.not_in(select(updates.c.message_id)),
    )
    return {
        ref.sha256
        for reply in tx.scalars(replies)
        for ref in references(pb.SubmitRequest.FromString(reply).content)
    }


def require_stored(tx: Connection, names: Collection[str]) -> None:
    """Raise ``NOT_FOUND`` if gc has deleted one of the objects since it was uploaded or sent with a task.

    Call it in the transaction that stores a reference to the objects. Gc deletes unreferenced objects and their rows in
    a transaction, so either gc sees the reference or this function finds the rows missing.
    """
    known = set(tx.scalars(select(readers.c.sha256).where(readers.c.sha256.in_(names))))
    for sha256 in names:
        if sha256 not in known:
            raise GymError(ErrorCode.NOT_FOUND, f"object {sha256} is gone", "upload it again")


def may_read(tx: Connection, contributor: str, sha256: str) -> bool:
    """Return True if a contributor may read an object."""
    allowed = readers.c.contributor.in_((contributor, "*"))
    if tx.scalar(select(readers.c.sha256).where(readers.c.sha256 == sha256, allowed)) is not None:
        return True
    shown = variants.c.delta_sha256 == sha256, readable(contributor)
    return tx.scalar(select(variants.c.name).where(*shown).limit(1)) is not None


def readable(contributor: str) -> ColumnElement[bool]:
    """Return the condition for rows of ``variants`` that exist and that the contributor owns or may read."""
    shared = (
        select(variant_readers.c.reader)
        .where(
            variant_readers.c.owner == variants.c.owner,
            variant_readers.c.name == variants.c.name,
            variant_readers.c.reader.in_((contributor, "*")),
        )
        .exists()
    )
    return and_(variants.c.document.is_not(None), or_(variants.c.owner == contributor, shared))
