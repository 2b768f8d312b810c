"""The integer sums of soups that add up: of a new version, and combined soups for contributors who were away."""

from __future__ import annotations

import tempfile
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from threading import Lock
from typing import Any

from gym_fed.config.hub.task import SoupReference, first_summed
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.delta.base import BaseSpec
from gym_fed.delta.file import DeltaFile
from gym_fed.delta.integer_sum import IntegerSum, require_sum
from gym_server.rounds.soups import Ingredients
from gym_server.rounds.versions import head_of, newest_to, soups_to, version_at
from gym_server.state import HubState
from gym_server.store.database import insert_if_absent
from gym_server.store.tables import objects, readers
from gym_server.store.usage import needed

_RECENT = 64
"""Combined soups start at one of so many versions before the current one. As many objects are kept: an account cannot
make the hub write more for each version."""


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
        """Return sha256 and size of the object that leads from a recent version to the current one.

        Args:
            start: Digest of the earlier version.
            end: Digest of the current version.

        Raises:
            GymError: ``NOT_FOUND`` if they are no such versions, or the soups between them do not add up.
        """
        with self._lock:  # one at a time: each takes the memory of two sums
            found = self._known.pop((start, end), None)
            if found is None or not self._state.store.has(found[0]):
                found = self._make(start, end)
            self._known[start, end] = found
            self._keep(*found)
            while len(self._known) > _RECENT:
                self._drop(self._known.popitem(last=False)[1][0])
        return found

    def _make(self, start: str, end: str) -> tuple[str, int]:
        base = self._state.base.digest
        with self._state.database.reading() as tx:
            head = head_of(tx, base)
            heights = newest_to(tx, head.height, _RECENT + 1)[1:]
            if len(heights) < _RECENT:
                heights.append(0)
            earlier = {version_at(tx, height, base).digest: height for height in heights}
            if end != head.digest or start not in earlier or start == end:
                raise _not_found(start, end)
            before, after = soups_to(tx, earlier[start]), soups_to(tx, head.height)
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

    def _drop(self, sha256: str) -> None:
        """Delete an object, unless it is also that of a version or is made of the same soups as another one."""
        if any(held[0] == sha256 for held in self._known.values()):
            return
        with self._state.database.transaction() as tx:
            if sha256 not in needed(tx, self._state.clock.earliest_now()):
                tx.execute(objects.delete().where(objects.c.sha256 == sha256))
                tx.execute(readers.delete().where(readers.c.sha256 == sha256))
                self._state.store.delete(sha256)


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
        "fetch the sum of the version instead",
    )
