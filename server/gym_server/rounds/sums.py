"""Integer sums of additive soups: those of new versions, and combined soups for contributors who were offline."""

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
"""Number of versions before the current one at which combined soups may start, and maximum number of kept objects."""

_KEPT_SECONDS = 3600.0
"""How long a combined soup is kept after its last request, for slow downloads, in seconds."""

_MOST_WAITING = 8
"""Maximum number of queued combined soups; further contributors download the version's sum instead."""


def sum_after(state: HubState, ingredients: Ingredients, soup: Path) -> IntegerSum | None:
    """Return the integer sum of the version that a soup creates; None if its codec is not additive.

    Raises:
        GymError: ``STATE_CORRUPT`` or ``BASE_MISMATCH`` if the parent's sum does not match the ledger.
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
    """Store the sum after a soup; return its digest and the object's sha256 and size, for the ledger."""
    total = sum_after(state, ingredients, soup)
    if total is None:
        return None
    before = state.round_store.soups(ingredients.parent.height)
    start = first_summed(before)
    base = before[start - 1].version_digest if start else state.base.digest
    sha256, size = _stored(state, total, base)
    return {"digest": total.digest(), "sum": sha256, "sum_bytes": size}


def sum_to(state: HubState, soups: Sequence[SoupReference]) -> IntegerSum:
    """Return the sum of the last soups, which are additive, from its stored object."""
    last = soups[-1]
    if last.sum_sha256 is None or last.integers is None:
        raise GymError(ErrorCode.INTERNAL, f"the soups of version {last.version_digest} do not add up")
    with DeltaFile.open(state.store.local_path(last.sum_sha256)) as opened:
        total = IntegerSum.of(opened)
    require_sum(total, last.integers)
    return total


@dataclass
class _Combined:
    """The job of creating one combined soup.

    Attributes:
        contributor: Account that first requested it.
        future: Future of the object's sha256 and size.
        used: Time of the last request by the hub's clock.
        kept: Time from which the object's age counts, by the hub's clock.
    """

    contributor: str
    future: Future[tuple[str, int]]
    used: float
    kept: float

    @property
    def sha256(self) -> str:
        """Name of the object; empty if it does not exist yet or could not be created."""
        done = self.future.done() and self.future.exception() is None
        return self.future.result()[0] if done else ""


class CombinedSoups:
    """Creates combined soups on demand, one at a time, on its own thread; use one instance per hub."""

    def __init__(self, state: HubState, config: ServerConfig) -> None:
        self._state, self._config = state, config
        self._jobs: OrderedDict[tuple[str, str], _Combined] = OrderedDict()  # most recently used last
        self._lock = Lock()
        self._worker = ThreadPoolExecutor(1, "combined-soups")  # each soup takes the memory of two sums

    def request(self, contributor: str, start: str, end: str) -> Future[tuple[str, int]]:
        """Return a future of the sha256 and size of the combined soup between two recent versions.

        Args:
            contributor: Account that needs it; it has at most one unfinished request.
            start: Digest of the earlier version.
            end: Digest of the later version.

        Raises:
            GymError: ``NOT_FOUND`` if they are not recent versions, if the soups between them are not additive, or if
                the hub has too little disk space or too many requests; ``BUSY`` during another request of the account.
                The future also raises ``NOT_FOUND``.
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
        """Cancel jobs that have not begun, so that the hub's process need not wait for them."""
        self._worker.shutdown(wait=False, cancel_futures=True)

    def _ready(self, start: str, end: str) -> _Combined | None:
        """Return the job of a pair, unless its object was deleted."""
        job = self._jobs.get((start, end))
        if job is None or ((sha256 := job.sha256) and not self._state.store.has(sha256)):
            return None
        self._jobs.move_to_end((start, end))
        return job

    def _checked(self, start: str, end: str) -> tuple[list[SoupReference], list[SoupReference]]:
        """Return the soups of two recent versions, after checking that the soups between them are additive."""
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
            if not full:  # no download uses it any more
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
        """Allow every contributor to read the object, and reset its age."""
        now = self._state.clock.now()
        with self._state.database.transaction() as tx:
            insert_if_absent(tx, objects, sha256=sha256, size_bytes=size, created_at=now)
            tx.execute(objects.update().where(objects.c.sha256 == sha256).values(created_at=now))
            insert_if_absent(tx, readers, sha256=sha256, contributor="*")

    def _drop(self, sha256: str) -> None:
        """Delete an object, unless a version or another combined soup uses it too."""
        with self._lock:
            if any(job.sha256 == sha256 for job in self._jobs.values()):
                return
        with self._state.database.transaction() as tx:
            if sha256 not in needed(tx, self._state.clock.earliest_now()):
                tx.execute(objects.delete().where(objects.c.sha256 == sha256))
                tx.execute(readers.delete().where(readers.c.sha256 == sha256))
                self._state.store.delete(sha256)


def being_made() -> GymError:
    """Create the error for a combined soup that is not ready yet, after which contributors retry."""
    return GymError(ErrorCode.BUSY, "the combined soup is being created", "request it again in a moment")


def _stored(state: HubState, total: IntegerSum, base: str) -> tuple[str, int]:
    """Store a sum since a version; return its sha256 and size."""
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
