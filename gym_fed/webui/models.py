"""The screen ``models``: what is on this machine, and merge, encode, export, rename, delete."""

from __future__ import annotations

import json
import shlex
import shutil
import subprocess
import threading
from pathlib import Path
from typing import Annotated, Any

from fastapi import APIRouter, Query
from pydantic import Field

from gym_fed.base.files import licence_of
from gym_fed.base.models import folder_here
from gym_fed.config.schema.base import StrictModel
from gym_fed.core.child_process import module_command
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.core.registries import CODECS
from gym_fed.serving.store.naming import variants_folder
from gym_fed.trust.identity.variant import VariantName
from gym_fed.web.app import Changing, Looking
from gym_fed.webui.inventory import LocalModel, find_base, local_bases, local_variants
from gym_fed.webui.model_actions import (
    ModelAction,
    ModelId,
    command_of,
    delete,
    dependents_of,
    merge_rules,
    rename,
    uses_of,
)
from gym_fed.webui.workbench import Workbench

_REGISTRY_SECONDS = 60.0
_one_at_a_time = threading.Lock()
"""Each reading of the registry is a process."""
Id = Annotated[str, Query(max_length=4096)]


class ActionRequest(StrictModel):
    """A job on models, or only its command."""

    do: ModelAction
    preview: bool = False


class RenameRequest(StrictModel):
    model: ModelId
    to: str = Field(min_length=1, max_length=200)
    confirmed: bool = False


class DeleteRequest(StrictModel):
    model: ModelId
    confirmed: bool = False


class DeleteVariantRequest(StrictModel):
    name: VariantName


def routes(workbench: Workbench) -> APIRouter:
    """``models`` and what is below it."""
    found = APIRouter()

    @found.get("/models")
    def models(visitor: Looking) -> dict[str, Any]:
        """The models and variants of this machine, and the free space."""
        return {
            "models": [
                {**model.facts(), "licence": _licence(workbench, model)} for model in local_bases(workbench)
            ],
            "variants": local_variants(),
            "free_bytes": shutil.disk_usage(workbench.folder).free,
            "folder": str(workbench.folder),
        }

    @found.get("/models/kinds")
    def kinds(visitor: Looking) -> dict[str, Any]:
        """Formats of exports, codecs, and rules to merge by."""
        from gym_fed.export.listing import formats

        return {"formats": formats(), "codecs": ["auto", *CODECS.names()], "rules": merge_rules()}

    @found.get("/models/registry")
    def registry(visitor: Looking) -> dict[str, Any]:
        """The newest versions of the registry's models."""
        return {"models": _registry(workbench.folder)}

    @found.get("/models/one")
    def one(model: Id, visitor: Looking) -> dict[str, Any]:
        """What uses a model now, and what depends on it."""
        chosen = find_base(workbench, model)
        return {"uses": uses_of(workbench, chosen), "dependents": dependents_of(workbench, chosen)}

    @found.post("/models/do")
    def act(given: ActionRequest, visitor: Changing) -> dict[str, Any]:
        """The command of an export, a delta or a merge; started as a job unless it is a preview."""
        words = command_of(workbench, given.do)
        text = shlex.join(words)
        if given.preview:
            return {"command": text, "job": None}
        job = workbench.jobs.start(words, title=f"{given.do.action.capitalize()} {given.do.output}")
        return {"command": text, "job": job.facts()}

    @found.post("/models/rename")
    def renamed(given: RenameRequest, visitor: Changing) -> dict[str, Any]:
        """Rename a model: its new id."""
        model = find_base(workbench, given.model)
        return {"model": rename(workbench, model, given.to, confirmed=given.confirmed)}

    @found.post("/models/delete")
    def deleted(given: DeleteRequest, visitor: Changing) -> dict[str, Any]:
        """Delete a model."""
        delete(workbench, find_base(workbench, given.model), confirmed=given.confirmed)
        return {}

    @found.post("/models/delete-variant")
    def variant_deleted(given: DeleteVariantRequest, visitor: Changing) -> dict[str, Any]:
        """Delete a variant."""
        from gym_fed.personalization.removal import remove_variant

        remove_variant(variants_folder(), given.name)
        return {}

    return found


def _licence(workbench: Workbench, model: LocalModel) -> str:
    """As the model's card states it; empty where it states none."""
    place = folder_here(model.id) if model.kind in ("package", "cache") else workbench.folder / model.id
    return "" if place is None or place.is_file() else licence_of(place)


def _registry(folder: Path) -> list[dict[str, Any]]:
    """The newest versions of the registry's models, as `gym models list` finds them: in a process of its own, since a
    registry may be far away, and its reader needs torch.

    Raises:
        GymError: ``UNAVAILABLE``; ``BUSY`` while another page reads it.
    """
    if not _one_at_a_time.acquire(blocking=False):
        raise GymError(ErrorCode.BUSY, "the registry is being read", "try again in a moment")
    try:
        return _read_registry(folder)
    finally:
        _one_at_a_time.release()


def _read_registry(folder: Path) -> list[dict[str, Any]]:
    words = module_command("gym_fed.cli.main", "models", "list", "--json")
    try:
        done = subprocess.run(
            words, cwd=folder, capture_output=True, text=True, timeout=_REGISTRY_SECONDS, check=True
        )
        rows = json.loads(done.stdout)
    except subprocess.CalledProcessError as error:
        said = GymError.last_in(error.stderr)
        why, hint = (said.message, said.hint) if said is not None else ("gym models list failed", "")
        raise GymError(ErrorCode.UNAVAILABLE, f"the registry cannot be read: {why}", hint) from error
    except (subprocess.TimeoutExpired, ValueError) as error:
        raise GymError(
            ErrorCode.UNAVAILABLE, "the registry does not answer", "look with: gym models list"
        ) from error
    return [row for row in rows if row["where"] == "registry"]
