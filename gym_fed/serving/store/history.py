"""List and verify earlier revisions of variants."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.serving.store.objects import DeltaObjects
from gym_fed.serving.store.records import VariantRecord
from gym_fed.serving.store.registry import VariantRegistry
from gym_fed.serving.store.verification import open_verified


@dataclass(frozen=True)
class VariantRevision:
    """A kept revision of a variant.

    Attributes:
        record: Its row; ``updated_at`` is the time at which it was added.
        figures: Measurements from its creation, such as losses; empty if unknown.
        is_newest: True if it is the revision that is served.
    """

    record: VariantRecord
    figures: dict[str, Any]
    is_newest: bool

    def to_dict(self) -> dict[str, Any]:
        """Convert to plain data for JSON."""
        return {**self.record.to_dict(), "figures": self.figures, "is_newest": self.is_newest}


@dataclass(frozen=True)
class RemovedVariant:
    """The result of ``VariantStore.remove``.

    Attributes:
        name: The name of the variant.
        revisions: The rows, newest first; empty if they were damaged.
        unlinked: The SHA-256 digests of deleted files.
        shared: The SHA-256 digests of files that stay, since other variants have the same bytes.
    """

    name: str
    revisions: tuple[VariantRecord, ...]
    unlinked: tuple[str, ...]
    shared: tuple[str, ...]


class VariantHistory:
    """The revisions in one store; see ``VariantStore.history``."""

    def __init__(self, registry: VariantRegistry, objects: DeltaObjects) -> None:
        self._registry = registry
        self._objects = objects

    def of(self, name: str) -> list[VariantRevision]:
        """Return the kept revisions of a variant, newest first.

        Raises:
            GymError: ``NOT_FOUND``; ``STATE_CORRUPT`` for a damaged row.
        """
        with self._registry.reading() as transaction:
            revisions, newest = transaction.revisions(name), transaction.get(name)
        if newest is None:
            raise GymError(ErrorCode.NOT_FOUND, f"no variant {name[:80]!r}")
        return [
            VariantRevision(record, _figures(text), record.revision == newest.revision)
            for record, text in revisions
        ]

    def path(self, revision: VariantRevision) -> Path:
        """Return the path of a revision's `.gymdelta`; do not write to it."""
        return self._objects.path(revision.record.sha256)

    def verify(self, revision: VariantRevision) -> None:
        """Check a revision like ``VariantStore.verify``, including its bytes; it may be unsigned.

        Raises:
            GymError: If a check fails; the message names the variant, the file and a remedy.
        """
        open_verified(
            revision.record, self._objects, self._registry, None, require_signature=False, again=True
        ).close()

    def kept(self) -> int:
        """Return the number of revisions to keep of each variant."""
        with self._registry.reading() as transaction:
            return transaction.kept()

    def keep(self, number: int) -> None:
        """Set the number of revisions to keep of each variant; ``VariantStore.gc`` removes the others."""
        with self._registry.writing() as transaction:
            transaction.keep(number)


@contextmanager
def ignoring_damage() -> Iterator[None]:
    """Ignore damaged rows in the block, since rows need not be readable to be removed."""
    try:
        yield
    except GymError as error:
        if error.code is not ErrorCode.STATE_CORRUPT:
            raise


def as_text(figures: Mapping[str, Any] | None) -> str | None:
    """Serialize figures for the ``figures`` column."""
    return json.dumps(dict(figures), sort_keys=True) if figures else None


def _figures(text: str | None) -> dict[str, Any]:
    """Parse the ``figures`` column; return an empty dict if it is malformed."""
    try:
        value = json.loads(text or "{}")
    except (TypeError, ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}
