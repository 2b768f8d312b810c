"""Make an earlier revision of a variant the newest again."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.serving.store.records import VariantRecord
from gym_fed.serving.store.signing import MAX_NOTE, sign_variant

if TYPE_CHECKING:
    from gym_fed.serving.store.store import VariantStore
    from gym_fed.trust.identity.keys import SigningKey

_AGAIN = re.compile(r"revision \d+ again(: )?", re.ASCII)


def undo(
    store: VariantStore, name: str, key: SigningKey | None, *, to: int | None = None
) -> tuple[VariantRecord, int]:
    """Make an earlier revision the newest again: its delta, under a new number that is signed anew.

    Args:
        store: Where it is.
        name: Of the variant.
        key: The owner's; None leaves the new revision unsigned.
        to: Which revision; None: the one before the newest.

    Returns:
        The new row, and the number of the earlier revision.

    Raises:
        GymError: ``NOT_FOUND`` for a revision that is not kept; what ``VariantHistory.verify`` and
            ``VariantStore.add`` refuse.
    """
    found = store.history.of(name)
    newest = next(one for one in found if one.is_newest).record
    earlier = [one for one in found if not one.is_newest]
    wanted = next((one for one in earlier if to is None or one.record.revision == to), None)
    if wanted is None:
        there = ", ".join(str(one.record.revision) for one in earlier) or "none"
        what = "an earlier revision" if to is None else f"an earlier revision {to}"
        raise GymError(
            ErrorCode.NOT_FOUND,
            f"variant {name!r}, at revision {newest.revision}, has not {what} here",
            f"earlier ones that are kept: {there}",
        )
    store.history.verify(wanted)
    old, path = wanted.record, store.history.path(wanted)
    before = _AGAIN.sub("", old.note, count=1)
    note = f"revision {old.revision} again{': ' if before else ''}{before}"[:MAX_NOTE]
    number = max(one.record.revision for one in found) + 1
    signed = None if key is None else sign_variant(path, key, name=name, revision=number, note=note)
    if signed is not None and signed.manifest.delta_sha256 != old.sha256:
        raise GymError(ErrorCode.HASH_MISMATCH, f"{path} was changed while it was being signed")
    record = store.add(
        path,
        signed,
        name=name,
        owner=newest.owner,
        replace=True,
        note="" if signed else note,
        figures=wanted.figures,
    )
    return record, old.revision
