"""The integer sums of soups that add up: of a new version, and combined soups for contributors who were offline."""

from __future__ import annotations

import logging
import tempfile
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import Any

from gym_fed.config.hub.server import ServerConfig
from gym_fed.config.hub.task import SoupReference, first_summed
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.delta.base import BaseSpec
from gym_fed.delta.file import DeltaFile
from gym_fed.delta.integer_sum import IntegerSum, require_sum
from gym_server.rounds.soups import Ingredients
from gym_server.rounds.versions import head_of, newest_to, soups_to, version_at
from gym_server.state import HubState
from gym_server.store.database import insert_if_absent
from gym_server.store.room import shortage
from gym_server.store.tables import objects, readers
from gym_server.store.usage import needed

log = logging.getLogger("gym_server")

_RECENT = 64
"""Combined soups start at one of the last N versions before the current one. At most N of their objects are kept."""

_KEPT_SECONDS = 3600.0
"""Time for which a combined soup is kept after its last request, for slow downloads."""

_MOST_WAITING = 8
"""Number of combined soups that may wait to be made; further contributors take the sum of the version instead."""


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


@dataclass
class _Combined:
    """The making of one combined soup.

    Attributes:
        contributor: Account that requested it first.
        future: Gives sha256 and size of the object.
        used: The hub's time of the last request.
        kept: The hub's time from which the object's age counts.
    """

    contributor: str
    future: Future[tuple[str, int]]
    used: float
    kept: float

    @property
    def sha256(self) -> str:
        """Name of the object; empty if it is not made yet, or could not be made."""
        done = self.future.done() and self.future.exception() is None
        return self.future.result()[0] if done else ""


class CombinedSoups:
    """Makes combined soups on demand, one at a time on its own thread; use one object per hub."""

    def __init__(self, state: HubState, config: ServerConfig) -> None:
        self._state, self._config = state, config
        self._jobs: OrderedDict[tuple[str, str], _Combined] = OrderedDict()  # last used last
        self._lock = Lock()
        self._worker = ThreadPoolExecutor(1, "combined-soups")  # each soup takes the memory of two sums

    def request(self, contributor: str, start: str, end: str) -> Future[tuple[str, int]]:
        """Return a future with the sha256 and size of the object that leads from one recent version to another.

        Args:
            contributor: Account that needs it; it has at most one unfinished request.
            start: Digest of the earlier version.
            end: Digest of the later version.

        Raises:
            GymError: ``NOT_FOUND`` if they are not such versions, the soups between them do not add up, or the hub has
                too little disk space or too many requests; ``BUSY`` during another request of the account. The future
                also raises ``NOT_FOUND``.
        """
        with self._lock:
            job = self._ready(start, end)
        if job is None:
            before, after = self._checked(start, end)
            with self._lock:
                job = self._ready(start, end) or self._begin(contributor, (start, end), before, after)
        now = job.used = self._state.clock.now()
        if job.future.done() and job.kept < now - _KEPT_SECONDS / 2:
            job.kept = now
            self._keep(*job.future.result())
        return job.future

    def close(self) -> None:
        """Drop jobs that have not begun, so that the hub's process need not wait for them."""
        self._worker.shutdown(wait=False, cancel_futures=True)

    def _ready(self, start: str, end: str) -> _Combined | None:
        """Return the job of a pair, unless its object was deleted."""
        job = self._jobs.get((start, end))
        if job is None or ((sha256 := job.sha256) and not self._state.store.has(sha256)):
            return None
        self._jobs.move_to_end((start, end))
        return job

    def _checked(self, start: str, end: str) -> tuple[list[SoupReference], list[SoupReference]]:
        """Return the soups that lead to two recent versions, after checking that those between add up."""
        base = self._state.base.digest
        with self._state.database.reading() as tx:
            heights = newest_to(tx, head_of(tx, base).height, _RECENT + 1)
            if len(heights) <= _RECENT:
                heights.append(0)
            recent = {version_at(tx, height, base).digest: height for height in heights}  # newest first
            if start == end or not {start, end} <= recent.keys():
                raise _not_found(start, end)
            sums = self._state.round_store.sums.read(tx)
            before, after = soups_to(tx, recent[start], sums), soups_to(tx, recent[end], sums)
        if len(before) >= len(after) or first_summed(after) > len(before):
            raise _not_found(start, end)
        return before, after

    def _begin(
        self,
        contributor: str,
        pair: tuple[str, str],
        before: Sequence[SoupReference],
        after: Sequence[SoupReference],
    ) -> _Combined:
        waiting = [job for job in self._jobs.values() if not job.future.done()]
        if any(job.contributor == contributor for job in waiting):
            raise being_made()
        self._jobs.pop(pair, None)
        now, dropped = self._state.clock.now(), ""
        full = len(self._jobs) >= _RECENT
        if full:
            oldest, job = next(iter(self._jobs.items()))
            full = not job.future.done() or job.used > now - _KEPT_SECONDS
            if not full:  # nobody is downloading it any more
                del self._jobs[oldest]
                dropped = job.sha256
        if full or len(waiting) >= _MOST_WAITING or shortage(self._state, self._config) is not None:
            raise _not_found(*pair)
        future = self._worker.submit(self._make, *pair, before, after, dropped)
        self._jobs[pair] = _Combined(contributor, future, now, now)
        return self._jobs[pair]

    def _make(
        self,
        start: str,
        end: str,
        before: Sequence[SoupReference],
        after: Sequence[SoupReference],
        dropped: str,
    ) -> tuple[str, int]:
        try:
            if dropped:
                self._drop(dropped)
            total = sum_to(self._state, after)
            if first_summed(before) < len(before):
                with DeltaFile.open(self._state.store.local_path(str(before[-1].sum_sha256))) as held:
                    total.add(held, -1)
            made = _stored(self._state, total, start)
            self._keep(*made)
        except Exception as error:
            log.exception("the soups between versions %s and %s are not combined", start, end)
            raise _not_found(start, end) from error
        return made

    def _keep(self, sha256: str, size: int) -> None:
        """Let every contributor read the object, and restart its age."""
        now = self._state.clock.now()
        with self._state.database.transaction() as tx:
            insert_if_absent(tx, objects, sha256=sha256, size_bytes=size, created_at=now)
            tx.execute(objects.update().where(objects.c.sha256 == sha256).values(created_at=now))
            insert_if_absent(tx, readers, sha256=sha256, contributor="*")

    def _drop(self, sha256: str) -> None:
        """Delete an object, unless it also belongs to a version or is made from the same soups as another one."""
        with self._lock:
            if any(job.sha256 == sha256 for job in self._jobs.values()):
                return
        with self._state.database.transaction() as tx:
            if sha256 not in needed(tx, self._state.clock.earliest_now()):
                tx.execute(objects.delete().where(objects.c.sha256 == sha256))
                tx.execute(readers.delete().where(readers.c.sha256 == sha256))
                self._state.store.delete(sha256)


def being_made() -> GymError:
    """Create the error for a combined soup that is not ready yet; contributors request it again."""
    return GymError(ErrorCode.BUSY, "a combined soup is being made for you", "request it again in a moment")


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
