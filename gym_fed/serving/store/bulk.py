"""Add variants in bulk: check all files first, sync them together, and register them in one transaction.

If one is refused, none is added, and the error names every refused file.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.core.failpoints import failpoint
from gym_fed.core.text import counted
from gym_fed.serving.store.objects import DeltaObjects, Staged
from gym_fed.serving.store.records import VariantRecord, validate_name, validate_owner
from gym_fed.serving.store.registry import Transaction, VariantRegistry
from gym_fed.serving.store.verification import admit_key, check_replaceable, checked_base, numbered, row_of
from gym_fed.trust.identity.keys import SigningKey
from gym_fed.trust.identity.variant import SignedVariant, VariantManifest

if TYPE_CHECKING:
    from gym_fed.delta.base import BaseSpec
    from gym_fed.serving.forward.target_modules import ModelLayout


MAX_FAULTS_SHOWN = 20
"""Maximum number of refused files that the error names."""

Progress = Callable[[str, int, int], None]
"""A function that is called with the current step, the number of finished items, and their total."""


@dataclass(frozen=True)
class IncomingVariant:
    """A variant to add.

    Attributes:
        delta: Path of the `.gymdelta` file.
        name: The name to serve it as.
        owner: An account's id, or a plain user id.
        note: A comment for people.
    """

    delta: Path
    name: str
    owner: str
    note: str = ""


@dataclass(frozen=True)
class _CheckedFile:
    """A valid copy and the row to insert for it."""

    new: IncomingVariant
    staged: Staged
    record: VariantRecord
    signed: SignedVariant | None


class BulkAddition:
    """The addition of many variants to a store.

    Args:
        objects: The store's files.
        registry: The store's rows.
        base: The base that every delta must belong to; None: any.
        layout: The layout of the served model; None if it is not known.
        key: The key that signs each variant; None leaves them unsigned.
        replaces: True if each may replace the owner's variant of the same name.
        progress: Called with each step and its progress.
    """

    def __init__(
        self,
        objects: DeltaObjects,
        registry: VariantRegistry,
        base: BaseSpec | None,
        layout: ModelLayout | None,
        key: SigningKey | None,
        *,
        replaces: bool,
        progress: Progress | None,
    ) -> None:
        self._objects = objects
        self._registry = registry
        self._base, self._layout = base, layout
        self._key = key
        self._replaces = replaces
        self._progress: Progress = progress or (lambda what, done, total: None)
        # By SHA-256, since identical files are checked and copied only once.
        self._bases: dict[str, tuple[str, str]] = {}
        self._copies: dict[str, Staged] = {}

    def add(self, variants: Sequence[IncomingVariant]) -> tuple[list[VariantRecord], set[str]]:
        """Add all variants; return their rows, and the deltas of revisions that are no longer kept.

        Raises:
            GymError: With every refused file, and the code of the first; nothing is then added.
        """
        _require_distinct(variants)
        try:
            checked = self._checked(variants)
            with _one_step(self._progress, "syncing", len(self._copies)):
                self._objects.sync(staged.path for staged in self._copies.values())
            failpoint("variants-staged")
            with self._registry.writing() as transaction:
                rows = self._admitted(transaction, checked)
                self._objects.adopt_all(self._copies.values())
                gone: set[str] = set()
                for row in rows:
                    gone |= transaction.put(row)
                failpoint("variants-before-commit")
        finally:
            for staged in self._copies.values():
                staged.path.unlink(missing_ok=True)
        return rows, gone

    def _checked(self, variants: Sequence[IncomingVariant]) -> list[_CheckedFile]:
        faults = _Faults(len(variants))
        checked: list[_CheckedFile] = []
        for number, new in enumerate(variants, 1):
            with faults.collected(new):
                checked.append(self._check(new))
            self._progress("checking", number, len(variants))
        faults.raise_any()
        return checked

    def _check(self, new: IncomingVariant) -> _CheckedFile:
        validate_name(new.name)
        validate_owner(new.owner)
        staged = self._objects.stage(new.delta)
        try:
            if staged.sha256 not in self._bases:
                self._bases[staged.sha256] = checked_base(staged, new.delta, self._base, self._layout)
        except BaseException:
            staged.path.unlink()
            raise
        if staged.sha256 in self._copies:
            staged.path.unlink()
            staged = self._copies[staged.sha256]
        self._copies[staged.sha256] = staged
        signed = None if self._key is None else self._sign(new, staged, self._key)
        note = new.note if signed is None else ""
        base = self._bases[staged.sha256]
        record = row_of(staged, base, signed, name=new.name, owner=new.owner, note=note)
        return _CheckedFile(new, staged, record, signed)

    def _sign(self, new: IncomingVariant, staged: Staged, key: SigningKey) -> SignedVariant:
        before = self._registry.get(new.name) if self._replaces else None
        model, digest = self._bases[staged.sha256]
        manifest = VariantManifest(
            variant=new.name,
            owner=key.contributor,
            base_model=model,
            base_digest=digest,
            delta_sha256=staged.sha256,
            size_bytes=staged.size_bytes,
            revision=1 if before is None else before.revision + 1,
            note=new.note,
        )
        return SignedVariant.sign(manifest, key)

    def _admitted(self, transaction: Transaction, checked: Sequence[_CheckedFile]) -> list[VariantRecord]:
        """Return the rows to insert, after checking that each may be added in the current state of the table."""
        faults = _Faults(len(checked))
        rows: list[VariantRecord] = []
        for file in checked:
            with faults.collected(file.new):
                before = transaction.get(file.record.name)
                if before is not None:
                    check_replaceable(before, file.record, self._replaces)
                admit_key(transaction, file.record, file.signed)
                rows.append(numbered(file.record, before, file.signed))
        faults.raise_any()
        return rows


class _Faults:
    """The refused files, and the reasons."""

    def __init__(self, total: int) -> None:
        self._total = total
        self._refused: list[tuple[IncomingVariant, GymError]] = []

    @contextmanager
    def collected(self, new: IncomingVariant) -> Iterator[None]:
        """Collect the refusal of a variant, so that the others are checked too; a full disk is raised immediately."""
        try:
            yield
        except GymError as error:
            if error.code is ErrorCode.DISK_FULL:
                raise
            self._refused.append((new, error))

    def raise_any(self) -> None:
        """Raise one error for all refused files, if there are any."""
        if not self._refused:
            return
        lines = [
            error.message if str(new.delta) in error.message else f"{new.delta}: {error.message}"
            for new, error in self._refused[:MAX_FAULTS_SHOWN]
        ]
        if more := len(self._refused) - len(lines):
            lines.append(f"and {counted(more, 'other')}")
        first = self._refused[0][1]
        refused = f"refused {len(self._refused)} of {counted(self._total, 'variant')}; none was added"
        raise GymError(first.code, "\n  ".join([f"{refused}:", *lines]), first.hint)


@contextmanager
def _one_step(progress: Progress, step: str, total: int) -> Iterator[None]:
    """Report the beginning and end of a step that has no intermediate progress."""
    progress(step, 0, total)
    yield
    progress(step, total, total)


def _require_distinct(variants: Sequence[IncomingVariant]) -> None:
    files: dict[str, Path] = {}
    for new in variants:
        if new.name in files:
            raise GymError(
                ErrorCode.USAGE,
                f"{new.delta} and {files[new.name]} would both be named {new.name!r}",
                "give each a different name in the list for --from",
            )
        files[new.name] = new.delta
