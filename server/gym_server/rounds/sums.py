"""The integer sums of soups that add up: of a new version, and combined soups for contributors who were away."""

from __future__ import annotations

import tempfile
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from threading import Lock
from typing import Any

from sqlalchemy import select

from gym_fed.config.hub.task import SoupReference, first_summed
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.delta.base import BaseSpec
from gym_fed.delta.file import DeltaFile
from gym_fed.delta.integer_sum import IntegerSum, require_sum
from gym_server.rounds.soups import Ingredients
from gym_server.rounds.versions import heights_to, soups_to
from gym_server.state import HubState
from gym_server.store.database import insert_if_absent
from gym_server.store.tables import objects, readers, versions

_KEPT = 256
"""Combined soups whose names are remembered; their objects go like all that nothing refers to."""


def sum_after(state: HubState, ingredients: Ingredients, soup: Path) -> IntegerSum | None:
    """Return the integer sum that leads to the version of a soup; None if its codec does not add up.

    Raises:
        GymError: ``STATE_CORRUPT`` or ``BASE_MISMATCH`` if the parent's sum is not that of the ledger.
    """
    if not ingredients.recipe.codec.adds_up:
        return None
    total, before = IntegerSum(), state.round_store.soups(ingredients.parent.height)
    if first_summed(before) < len(before):
        total = sum_to(state, before)
    with DeltaFile.open(soup, _spec(state, ingredients.parent.digest)) as opened:
        total.add(opened)
    return total


def stored_sum(state: HubState, ingredients: Ingredients, soup: Path) -> dict[str, Any] | None:
    """Store the sum after a soup; return its digest, and the sha256 and size of its object, for the ledger."""
    total = sum_after(state, ingredients, soup)
    if total is None:
        return None
    before = state.round_store.soups(ingredients.parent.height)
    start = first_summed(before)
    base = before[start - 1].version_digest if start else state.base.digest
    sha256, size = _stored(state, total, base)
    return {"digest": total.digest(), "sum": sha256, "sum_bytes": size}


def sum_to(state: HubState, soups: Sequence[SoupReference]) -> IntegerSum:
    """Return the sum of the last soups, which add up, from its object."""
    last = soups[-1]
    if last.sum_sha256 is None or last.integers is None:
        raise GymError(ErrorCode.INTERNAL, f"the soups of version {last.version_digest} do not add up")
    with DeltaFile.open(state.store.local_path(last.sum_sha256)) as opened:
        total = IntegerSum.of(opened)
    require_sum(total, last.integers)
    return total


class CombinedSoups:
    """Makes combined soups on demand; use one object per hub."""

    def __init__(self, state: HubState) -> None:
        self._state = state
        self._known: OrderedDict[tuple[str, str], tuple[str, int]] = OrderedDict()
        self._lock = Lock()

    def get(self, start: str, end: str) -> tuple[str, int]:
        """Return sha256 and size of the object that leads from one version to a later one, by their digests.

        Raises:
            GymError: ``NOT_FOUND`` if there are no such versions, or the soups between them do not add up.
        """
        with self._lock:  # one at a time: each takes the memory of two sums
            found = self._known.get((start, end))
            if found is None or not self._state.store.has(found[0]):
                found = self._known[start, end] = self._make(start, end)
                while len(self._known) > _KEPT:
                    self._known.popitem(last=False)
            self._keep(*found)
        return found

    def _make(self, start: str, end: str) -> tuple[str, int]:
        with self._state.database.reading() as tx:
            heights = {
                row.digest: row.height for row in tx.execute(select(versions.c.digest, versions.c.height))
            }
            heights[self._state.base.digest] = 0
            lead = heights_to(tx, heights[end]) | {0} if end in heights else set()
            if heights.get(start) not in lead or start == end:
                raise _not_found(start, end)
            before, after = soups_to(tx, heights[start]), soups_to(tx, heights[end])
        if first_summed(after) > len(before):
            raise _not_found(start, end)
        total = sum_to(self._state, after)
        if first_summed(before) < len(before):
            with DeltaFile.open(self._state.store.local_path(str(before[-1].sum_sha256))) as held:
                total.add(held, -1)
        return _stored(self._state, total, start)

    def _keep(self, sha256: str, size: int) -> None:
        """Let every contributor read the object, and count its age from now."""
        now = self._state.clock.now()
        with self._state.database.transaction() as tx:
            insert_if_absent(tx, objects, sha256=sha256, size_bytes=size, created_at=now)
            tx.execute(objects.update().where(objects.c.sha256 == sha256).values(created_at=now))
            insert_if_absent(tx, readers, sha256=sha256, contributor="*")


def _stored(state: HubState, total: IntegerSum, base: str) -> tuple[str, int]:
    """Write a sum since a version into the store; return its sha256 and size."""
    with tempfile.TemporaryDirectory(dir=state.folder / "staging", prefix="replay-") as folder:
        path = Path(folder) / "sum.gymdelta"
        info = total.write(path, _spec(state, base))
        state.store.put_file(path)
    return info.sha256, info.size_bytes


def _spec(state: HubState, digest: str) -> BaseSpec:
    return BaseSpec(state.base.model_name, digest, state.base.shapes)


def _not_found(start: str, end: str) -> GymError:
    return GymError(
        ErrorCode.NOT_FOUND,
        f"no combined soup leads from version {start[:80]} to {end[:80]}",
        "fetch the soups one by one",
    )
