"""The registry of models, which are signed when pushed and verified when pulled; versions are never replaced.

registry = ModelRegistry("s3://bucket/models")
registry.push("me/stories", "runs/stories", licence="Apache-2.0")
folder = registry.pull("me/stories")
"""

from __future__ import annotations

import builtins
import os
import time
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from gym_fed.base.models import folder_here
from gym_fed.core.aliases import on_class_too
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.core.files import default_home
from gym_fed.data.objects import Objects
from gym_fed.registry.contents import base_model, rebuild
from gym_fed.registry.fetching import Damage, Pulled, fetch
from gym_fed.registry.manifest import (
    DELTA_FILE,
    MAX_MANIFEST_BYTES,
    NOT_STATED,
    BaseUsed,
    DataUsed,
    ModelVersion,
    Parent,
    Signer,
    TagMove,
    sealed,
)
from gym_fed.registry.preparing import Note, StatedFacts, prepared
from gym_fed.registry.signers import Confirm, Pins, own_key
from gym_fed.registry.versions import LATEST, VersionStore, publish, require_tag, split_reference
from gym_fed.trust.identity.keys import SigningKey


def default_model_store() -> str:
    """Return ``$GYM_MODELS``, else ``models`` in ``$GYM_HOME`` or ``~/.gym-fed``."""
    return os.environ.get("GYM_MODELS") or str(default_home() / "models")


class DamagedWarning(UserWarning):
    """A warning that an entry of a store is damaged and omitted from a list."""


class ModelRegistry:
    """The models on one store.

    Args:
        url: A folder, or an fsspec URL such as ``s3://bucket/models``; by default ``default_model_store()``.
    """

    def __init__(self, url: str | Path | None = None) -> None:
        self.url = str(default_model_store() if url is None else url)
        self._objects = Objects(self.url)
        self._versions = VersionStore(self._objects)
        self._pins = Pins(self._objects.place)

    @on_class_too
    def push(
        self,
        name: str,
        model: Any,
        config: BaseModel | Mapping[str, Any] | None = None,
        *,
        tokenizer: Any = None,
        licence: str = NOT_STATED,
        description: str = "",
        base: str | None = None,
        parents: Sequence[str] = (),
        data: Sequence[DataUsed] = (),
        evaluations: Sequence[Path] = (),
        key: SigningKey | None = None,
        note: Note = lambda line: None,
    ) -> ModelVersion:
        """Publish a model as the next version of ``name``, signed.

        Files on the store are not sent again; pushing the newest version again returns that version.

        Args:
            name: Lowercase letters, digits, dots and dashes, with at most one ``/``.
            model: The folder of a model, of a run or of an adapter; a ``.gymdelta``; a ``TrainResult``; or anything
                with ``save_pretrained``.
            config: Config of a model in memory, which is stored as ``config.yaml``.
            tokenizer: The tokenizer of a model in memory; a ``TrainResult`` has its own.
            licence: An SPDX identifier.
            description: A few lines.
            base: The name or folder of the base of an adapter or a delta, if it cannot be found by the name in it.
            parents: Versions in this registry (``name@version``) that the model was derived from.
            data: Rows that the model was trained on, in addition to those in the run's record.
            evaluations: Records of ``gym eval``, or folders of records, from which those of this model are taken.
            key: The signing key; by default the user's own.
            note: Called with the names of omitted files.

        Raises:
            GymError: ``USAGE`` without a valid name or licence, or if ``model`` is not a model;
                ``MODEL_INVALID``, ``DELTA_INVALID``, ``BASE_MISMATCH``; ``DATA_INVALID`` for records of another model,
                and if a file changes while it is read.
        """
        stated = StatedFacts(licence, description, base, self._parents(parents), data, evaluations)
        key = key or own_key()
        with prepared(
            name, model, stated, config=config, tokenizer=tokenizer, known_base=self._known_base, note=note
        ) as ready:
            pushed = publish(self._objects, self._versions, ready.draft, ready.files, key)
        self._pins.add(name, pushed.signer)
        if pushed.manifest.digest is not None:
            self._versions.note_digest(pushed.manifest.digest, name, pushed.version)
        return pushed

    @on_class_too
    def pull(
        self,
        reference: str,
        dest: str | Path | None = None,
        *,
        confirm: Confirm | None = None,
        signer: str | None = None,
        base: str | None = None,
        as_is: bool = False,
    ) -> Path:
        """Fetch ``name``, ``name@version`` or ``name:tag``; an interrupted pull resumes.

        Args:
            reference: The version to fetch.
            dest: The target folder; by default a folder in ``~/.gym-fed/pulled/models``.
            confirm: Confirms that the first key of a model is its author's; without it, ``signer`` must name the key.
            signer: The fingerprint of the required signing key.
            base: The name or folder of the base of a delta, if it is not found by its name or digest.
            as_is: True to keep a delta as a ``.gymdelta`` with its card, without rebuilding its model.

        Returns:
            The folder, which every ``model`` argument of gym-fed accepts.

        Raises:
            GymError: ``NOT_FOUND``; ``SIGNATURE_INVALID``, ``UNAUTHENTICATED`` or ``PERMISSION_DENIED``, see
                ``Pins.require``; ``FILE_EXISTS`` before anything is fetched; ``HASH_MISMATCH`` for damaged objects and
                a model that is not the signed one; ``MODEL_NOT_FOUND`` for a missing base; ``BASE_MISMATCH``.
        """
        return self.fetch(reference, dest, confirm=confirm, signer=signer, base=base, as_is=as_is).folder

    def fetch(
        self,
        reference: str,
        dest: str | Path | None = None,
        *,
        confirm: Confirm | None = None,
        signer: str | None = None,
        base: str | None = None,
        as_is: bool = False,
    ) -> Pulled:
        """Pull like ``pull``, and return the details."""
        version = self.trusted(reference, confirm=confirm, signer=signer)
        record = self._objects.read(f"models/{version.name}/{version.version:06}.json", MAX_MANIFEST_BYTES)
        kind = "as-is" if as_is and version.manifest.kind == "delta" else ""
        folder = Path(dest) if dest is not None else _default_folder(version, kind)
        base_used: str | None = None
        rebuilds = version.manifest.kind == "delta" and not as_is
        if rebuilds and not folder.exists():
            base_used = self.base_of(version, base, confirm)
        elif version.manifest.base is not None:
            base_used = base or _named_here(version.manifest.base.name)
        kept = None if version.manifest.kind == "weights" or rebuilds else 1.0

        def finish(part: Path) -> None:
            nonlocal kept
            if rebuilds:
                assert base_used is not None
                assert version.manifest.base is not None
                loaded = base_model(base_used, version.manifest.base.digest or "")
                kept = rebuild(loaded, part / DELTA_FILE, version.manifest.digest, part)

        fetched = fetch(self._objects, version, record, folder, finish)
        return Pulled(version, folder, fetched, base_used, kept)

    def trusted(
        self, reference: str, *, confirm: Confirm | None = None, signer: str | None = None
    ) -> ModelVersion:
        """Return the version that ``reference`` names, if its signer and the signer of the tag are trusted.

        Raises:
            GymError: See ``pull``.
        """
        name, number, move = self._versions.resolve(reference)
        version = self._versions.read(name, number)
        self._pins.require(name, version.reference, version.signer, confirm, signer)
        if move is not None:
            self._pins.require(name, f"{name}:{move[0].tag}", move[1], confirm, None)
            if move[0].manifest_sha256 != version.sha256:
                raise GymError(
                    ErrorCode.SIGNATURE_INVALID,
                    f"{reference}: the tag refers to a different {version.reference}, {move[0].manifest_sha256}",
                    "the version was replaced after it was tagged: ask its author",
                )
        return version

    def show(self, reference: str) -> ModelVersion:
        """Return a version with a valid signature, whose signer need not be trusted.

        Raises:
            GymError: ``NOT_FOUND``, ``STATE_CORRUPT``, ``SIGNATURE_INVALID``.
        """
        name, number, _ = self._versions.resolve(reference)
        return self._versions.read(name, number)

    def is_pinned(self, version: ModelVersion) -> bool:
        """Return True if the key that signed a version is trusted for its name."""
        return version.signer.public_key in self._pins.keys(version.name)

    def verify(
        self, reference: str, *, confirm: Confirm | None = None, signer: str | None = None
    ) -> tuple[ModelVersion, builtins.list[Damage]]:
        """Verify the signature, the signer, and every object of a version on the store.

        Returns:
            The version, and the files that are missing or damaged.

        Raises:
            GymError: Errors of ``pull`` for the signature and the signer.
        """
        version = self.trusted(reference, confirm=confirm, signer=signer)
        damaged = []
        for file in version.manifest.files:
            digest = self._objects.digest(file.sha256, file.num_bytes)
            if digest is None:
                damaged.append(Damage(file.path, f"object {file.sha256} is missing"))
            elif digest != file.sha256:
                damaged.append(Damage(file.path, f"object {file.sha256} has different bytes"))
        return version, damaged

    def list(self) -> builtins.list[ModelVersion]:
        """Return the newest version of every model, by name; damaged versions are skipped with a warning."""
        newest = []
        for name in self._versions.names():
            try:
                newest.append(self._versions.read(name, self._versions.numbers(name)[-1]))
            except GymError as error:
                warnings.warn(f"skipped: {error}", DamagedWarning, stacklevel=2)
        return newest

    def require_there(self) -> None:
        """Refuse a store that does not exist.

        Raises:
            GymError: ``NOT_FOUND``.
        """
        if not self._objects.is_there():
            raise GymError(
                ErrorCode.NOT_FOUND, f"there is no registry at {self.url}", "check the folder or the URL"
            )

    def names(self) -> builtins.list[str]:
        """Return the names of all models."""
        return self._versions.names()

    def has(self, reference: str) -> bool:
        """Return True if a reference names a model in this registry; False also for an invalid name."""
        try:
            name, _, _ = split_reference(reference)
        except GymError:
            return False
        return bool(self._versions.numbers(name))

    def versions(self, name: str) -> builtins.list[int]:
        """Return the versions of a model in ascending order."""
        return self._versions.numbers(name)

    def tag(self, reference: str, tag: str, *, key: SigningKey | None = None) -> TagMove:
        """Set a tag to a version; a tag of another version is moved, and its history is kept.

        Raises:
            GymError: ``USAGE`` for an invalid tag and for ``latest``, which always refers to the newest version;
                ``NOT_FOUND``.
        """
        _require_free(tag)
        version = self.show(reference)
        moves = self._versions.moves(version.name, tag)
        if moves and (moves[-1][0].version, moves[-1][0].manifest_sha256) == (
            version.version,
            version.sha256,
        ):
            return moves[-1][0]
        return self._move(version.name, tag, version, key or own_key())

    def untag(self, name: str, tag: str, *, key: SigningKey | None = None) -> TagMove:
        """Remove a tag; its history is kept.

        Raises:
            GymError: ``NOT_FOUND`` if the model has no such tag.
        """
        _require_free(tag)
        if self.tags(name).get(tag) is None:
            raise GymError(ErrorCode.NOT_FOUND, f"{self.url}: {name} has no tag {tag}")
        return self._move(name, tag, None, key or own_key())

    def tags(self, name: str) -> dict[str, int]:
        """Return the tags of a model and their versions, including ``latest``."""
        numbers = self._versions.numbers(name)
        tags_by_name = {LATEST: numbers[-1]} if numbers else {}
        for tag in self._versions.tags(name):
            version = self._versions.moves(name, tag)[-1][0].version
            if version is not None:
                tags_by_name[tag] = version
        return tags_by_name

    def all_tags(self, name: str) -> builtins.list[str]:
        """Return every tag that a model ever had, without ``latest``."""
        return self._versions.tags(name)

    def has_base(self, version: ModelVersion) -> bool:
        """Return True if a version's base is on this machine by its name, or in this registry by its digest."""
        base = version.manifest.base
        if base is None or _named_here(base.name) is not None:
            return True
        return base.digest is not None and self._versions.with_digest(base.digest) is not None

    def history(self, name: str, tag: str) -> builtins.list[tuple[TagMove, Signer]]:
        """Return all moves of a tag, oldest first, with their signatures checked."""
        return self._versions.moves(name, tag)

    def _move(self, name: str, tag: str, version: ModelVersion | None, key: SigningKey) -> TagMove:
        def numbered(number: int) -> TagMove:
            return TagMove(
                name=name,
                tag=tag,
                number=number,
                version=None if version is None else version.version,
                manifest_sha256=None if version is None else version.sha256,
                created_at=now,
            )

        now = int(time.time())
        number = self._versions.move(name, tag, lambda number: sealed(numbered(number), key))
        self._pins.add(name, Signer(key.public_key))
        return numbered(number)

    def _parents(self, references: Sequence[str]) -> builtins.list[Parent]:
        versions = [self.show(reference) for reference in references]
        return [Parent(version=version.reference, sha256=version.sha256) for version in versions]

    def _known_base(self, base: BaseUsed) -> BaseUsed:
        """Return a base, with its version in this registry if there is one."""
        version = None if base.digest is None else self._versions.with_digest(base.digest)
        if version is None:
            return base
        licence = version.manifest.licence if base.licence == NOT_STATED else base.licence
        return base.model_copy(update={"version": version.reference, "licence": licence})

    def base_of(self, version: ModelVersion, given: str | None, confirm: Confirm | None) -> str:
        """Find the base of a delta: the given base, or by its name on this machine, or in this registry.

        Raises:
            GymError: ``MODEL_NOT_FOUND`` naming it and its digest.
        """
        base = version.manifest.base
        if base is None or base.digest is None:
            raise GymError(ErrorCode.STATE_CORRUPT, f"{version.reference} is a delta without a base")
        if given is not None:
            return given
        if (here := _named_here(base.name)) is not None:
            return here
        if (there := self._versions.with_digest(base.digest)) is not None:
            return str(self.pull(there.reference, confirm=confirm))
        raise GymError(
            ErrorCode.MODEL_NOT_FOUND,
            f"{version.reference} is a delta on {base.name} ({base.digest}), which is not on this machine",
            f"fetch it: gym models pull {base.name}; or pass its folder with --base",
        )


def _named_here(name: str) -> str | None:
    return name if folder_here(name) is not None else None


def _default_folder(pulled: ModelVersion, kind: str) -> Path:
    version = str(pulled.version) + (f"-{kind}" if kind else "")
    return default_home() / "pulled" / "models" / pulled.name / version


def _require_free(tag: str) -> None:
    require_tag(tag)
    if tag == LATEST:
        raise GymError(
            ErrorCode.USAGE,
            f"{LATEST} always refers to the newest version",
            "choose another tag, such as stable",
        )
