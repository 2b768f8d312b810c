"""The ``models`` screen: the models of this machine, and merge, encode, export, rename and delete."""

from __future__ import annotations

import shlex
import shutil
import threading
from pathlib import Path
from typing import Annotated, Any

from fastapi import APIRouter, Query
from pydantic import Field

from gym_fed.base.files import licence_of
from gym_fed.base.models import folder_here
from gym_fed.config.schema.base import StrictModel
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.core.registries import CODECS
from gym_fed.serving.store.naming import variants_folder
from gym_fed.trust.identity.variant import VariantName
from gym_fed.web.app import Changing, Looking
from gym_fed.webui.commands import json_of
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
"""The registry is read by one child process at a time."""
Id = Annotated[str, Query(max_length=4096)]


class ActionRequest(StrictModel):
    """A job on models, or a preview of its command."""

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
    """Create the routes below ``/models``."""
    router = APIRouter()

    @router.get("/models")
    def models(visitor: Looking) -> dict[str, Any]:
        """List the models and variants of this machine and the free disk space."""
        return {
            "models": [
                {**model.facts(), "licence": _licence(workbench, model)} for model in local_bases(workbench)
            ],
            "variants": local_variants(),
            "free_bytes": shutil.disk_usage(workbench.folder).free,
            "folder": str(workbench.folder),
        }

    @router.get("/models/kinds")
    def kinds(visitor: Looking) -> dict[str, Any]:
        """List export formats, codecs and merge rules."""
        from gym_fed.export.listing import formats

        return {"formats": formats(), "codecs": ["auto", *CODECS.names()], "rules": merge_rules()}

    @router.get("/models/registry")
    def registry(visitor: Looking) -> dict[str, Any]:
        """List the newest versions of the registry's models."""
        return {"models": _registry(workbench.folder)}

    @router.get("/models/one")
    def one(model: Id, visitor: Looking) -> dict[str, Any]:
        """Describe what uses a model and what depends on it."""
        chosen = find_base(workbench, model)
        return {"uses": uses_of(workbench, chosen), "dependents": dependents_of(workbench, chosen)}

    @router.post("/models/do")
    def act(given: ActionRequest, visitor: Changing) -> dict[str, Any]:
        """Return the command of an export, a delta or a merge; start it unless this is a preview."""
        words = command_of(workbench, given.do)
        text = shlex.join(words)
        if given.preview:
            return {"command": text, "job": None}
        job = workbench.jobs.start(words, title=f"{given.do.action.capitalize()} {given.do.output}")
        return {"command": text, "job": job.facts()}

    @router.post("/models/rename")
    def renamed(given: RenameRequest, visitor: Changing) -> dict[str, Any]:
        """Rename a model; return its new id."""
        model = find_base(workbench, given.model)
        return {"model": rename(workbench, model, given.to, confirmed=given.confirmed)}

    @router.post("/models/delete")
    def deleted(given: DeleteRequest, visitor: Changing) -> dict[str, Any]:
        """Delete a model."""
        delete(workbench, find_base(workbench, given.model), confirmed=given.confirmed)
        return {}

    @router.post("/models/delete-variant")
    def variant_deleted(given: DeleteVariantRequest, visitor: Changing) -> dict[str, Any]:
        """Delete a variant."""
        from gym_fed.personalization.removal import remove_variant

        remove_variant(variants_folder(), given.name)
        return {}

    return router


def _licence(workbench: Workbench, model: LocalModel) -> str:
    """Return the licence on the model card; empty if there is none."""
    place = folder_here(model.id) if model.kind in ("package", "cache") else workbench.folder / model.id
    return "" if place is None or place.is_file() else licence_of(place)


def _registry(folder: Path) -> list[dict[str, Any]]:
    """Return the newest versions of the registry's models from `gym models list`.

    A child process reads the registry, which may be slow to reach and needs torch.

    Raises:
        GymError: ``UNAVAILABLE``; ``BUSY`` while another page reads it.
    """
    if not _one_at_a_time.acquire(blocking=False):
        raise GymError(ErrorCode.BUSY, "the registry is being read", "try again in a moment")
    try:
        rows = json_of(["gym", "models", "list"], folder, _REGISTRY_SECONDS)
    except GymError as error:
        raise GymError(
            ErrorCode.UNAVAILABLE, f"the registry cannot be read: {error.message}", error.hint
        ) from error
    finally:
        _one_at_a_time.release()
    return [row for row in rows if row["where"] == "registry"]
