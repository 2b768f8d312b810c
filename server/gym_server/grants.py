"""Who may read an object: whoever sent it, those whom a task or version names it to, and a variant's readers."""

from __future__ import annotations

from sqlalchemy import ColumnElement, Connection, and_, or_, select

from gym_server.store.tables import readers, variant_readers, variants


def may_read(tx: Connection, contributor: str, sha256: str) -> bool:
    """Whether a contributor may read an object."""
    allowed = readers.c.contributor.in_((contributor, "*"))
    if tx.scalar(select(readers.c.sha256).where(readers.c.sha256 == sha256, allowed)) is not None:
        return True
    shown = variants.c.delta_sha256 == sha256, readable(contributor)
    return tx.scalar(select(variants.c.name).where(*shown).limit(1)) is not None


def readable(contributor: str) -> ColumnElement[bool]:
    """The rows of ``variants`` that are there, and are the contributor's or may be read by it."""
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
