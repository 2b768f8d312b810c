"""Writes a model as a repository of the Hub has it: weights or adapter, tokenizer, card, licence, `.eval_results`.

A delta is written as the weights that it makes of its base, since nothing on the Hub reads a delta; `as_is` leaves it.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.core.failpoints import failpoint
from gym_fed.core.files import whole_or_not_at_all, write_atomically
from gym_fed.registry.card.conflicts import conflicts
from gym_fed.registry.card.evaluations import EVALS, figures_in
from gym_fed.registry.card.readme import is_name_of_the_hub
from gym_fed.registry.contents import base_model
from gym_fed.registry.fetching import RECORD
from gym_fed.registry.hub.results import hub_results
from gym_fed.registry.manifest import DELTA_FILE, ModelManifest
from gym_fed.registry.models import ModelRegistry
from gym_fed.registry.preparing import Note, StatedFacts, prepared
from gym_fed.registry.rebuild import rebuild
from gym_fed.registry.signers import Confirm


@dataclass(frozen=True)
class HubFolder:
    """A folder that is ready to be uploaded.

    Attributes:
        folder: Where it is.
        manifest: Of the model; its number, sizes and digests count for a version of a registry only.
        problems: What a person should look at before it is public, a sentence each.
    """

    folder: Path
    manifest: ModelManifest
    problems: list[str]

    @property
    def files(self) -> list[str]:
        """Paths in the folder, sorted."""
        found = (path for path in self.folder.rglob("*") if path.is_file())
        return sorted(path.relative_to(self.folder).as_posix() for path in found)


def hub_folder_of_model(
    name: str,
    model: Any,
    folder: str | Path,
    stated: StatedFacts,
    *,
    as_is: bool = False,
    note: Note = lambda line: None,
) -> HubFolder:
    """Write a model of this machine.

    Args:
        name: For the card's title; as for ``ModelRegistry.push``.
        model: As for ``ModelRegistry.push``.
        folder: Must not exist, or be empty.
        stated: By a person.
        as_is: Leave a delta as a ``.gymdelta``.
        note: Gets the names of files that are left out.

    Raises:
        GymError: ``FILE_EXISTS``; as ``prepared`` and ``rebuild``; ``MODEL_NOT_FOUND`` for a base that is not here.
    """
    target = _free(folder)
    with prepared(name, model, stated, note=note) as ready:
        base = stated.base or (ready.draft.base.name if ready.draft.base is not None else None)
        return _written(ready.draft, ready.files, target, None if as_is else base)


def hub_folder_of_version(
    registry: ModelRegistry,
    reference: str,
    folder: str | Path,
    *,
    confirm: Confirm | None = None,
    signer: str | None = None,
    base: str | None = None,
    as_is: bool = False,
) -> HubFolder:
    """Write a version of a registry, with its signed manifest as ``.gym-model.json``.

    Raises:
        GymError: ``FILE_EXISTS``; as ``ModelRegistry.pull``.
    """
    target = _free(folder)
    found = registry.trusted(reference, confirm=confirm, signer=signer)
    used = None
    if found.manifest.kind == "delta" and not as_is:
        used = registry.base_of(found, base, confirm)
    with tempfile.TemporaryDirectory() as scratch:
        pulled = registry.fetch(found.reference, Path(scratch) / "model", signer=signer, as_is=True).folder
        files = {path: pulled / path for path in (RECORD, *(file.path for file in found.manifest.files))}
        return _written(found.manifest, files, target, used)


def _written(manifest: ModelManifest, files: Mapping[str, Path], target: Path, base: str | None) -> HubFolder:
    records = [file for path, file in files.items() if path.startswith(f"{EVALS}/")]
    results = hub_results(figures_in(records))
    with whole_or_not_at_all(target) as part:
        for path, file in files.items():
            (part / path).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(file, part / path)
        if manifest.kind == "delta" and base is not None:
            assert manifest.base is not None
            loaded = base_model(base, manifest.base.digest or "")
            rebuild(loaded, part / DELTA_FILE, manifest.digest, part)
        for path, text in results.items():
            (part / path).parent.mkdir(exist_ok=True)
            write_atomically(part / path, text.encode())
        failpoint("registry-hub-folder-written")
    return HubFolder(target, manifest, [*conflicts(manifest), *_problems(manifest)])


def _problems(manifest: ModelManifest) -> list[str]:
    """What the Hub's readers of the folder would trip over."""
    if manifest.kind != "adapter" or manifest.base is None or is_name_of_the_hub(manifest.base.name):
        return []
    return [
        f"base {manifest.base.name}: is no name of the Hub, so PEFT does not find the adapter's base: name it with "
        "--base OWNER/NAME"
    ]


def _free(folder: str | Path) -> Path:
    target = Path(folder).expanduser()
    if os.path.lexists(target) and (target.is_symlink() or not target.is_dir() or any(target.iterdir())):
        raise GymError(
            ErrorCode.FILE_EXISTS, f"{target}: exists, and is no empty folder", "choose another with -o"
        )
    return target
