"""The ``models`` screen: list, merge, encode, export, rename and delete the models on this machine."""

from __future__ import annotations

import os
import shlex
import shutil
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

from fastapi import APIRouter, Query
from pydantic import Field

from gym_fed.base.files import licence_of
from gym_fed.base.models import folder_here
from gym_fed.config.schema.base import StrictModel
from gym_fed.config.yaml.strict import read_config_text
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.core.json_files import read_object
from gym_fed.core.plain_yaml import parse_value
from gym_fed.core.registries import CODECS
from gym_fed.serving.store.naming import variants_folder
from gym_fed.training.run.folder import is_held
from gym_fed.trust.identity.variant import VariantName
from gym_fed.web.app import Changing, Looking
from gym_fed.web.jobs import json_of
from gym_fed.webui.inventory import LocalModel, find_base, local_bases, local_variants, servers_of
from gym_fed.webui.model_actions import ModelAction, ModelId, merge_rules
from gym_fed.webui.workbench import Workbench

_REGISTRY_SECONDS = 60.0


_one_at_a_time = threading.Lock()
"""Lock that lets one child process at a time read the registry."""


Id = Annotated[str, Query(max_length=4096)]


_MOVABLE = ("run", "folder", "adapter", "gguf")


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
        """List the models and variants on this machine, and the free disk space."""
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
        from gym_fed.export.choice import formats

        return {"formats": formats(), "codecs": ["compact", "auto", *CODECS.names()], "rules": merge_rules()}

    @router.get("/models/registry")
    def registry(visitor: Looking) -> dict[str, Any]:
        """List the newest versions of the registry's models."""
        return {"models": _registry(workbench.folder)}

    @router.get("/models/one")
    def one(model: Id, visitor: Looking) -> dict[str, Any]:
        """Return the model's base, and descriptions of the model's users and dependents."""
        chosen = find_base(workbench, model)
        return {
            "base": base_of(workbench, chosen, local_bases(workbench)),
            "uses": uses_of(workbench, chosen),
            "dependents": dependents_of(workbench, chosen),
        }

    @router.post("/models/do")
    def act(given: ActionRequest, visitor: Changing) -> dict[str, Any]:
        """Return the command of an action; start it unless this is a preview."""
        words = given.do.command(workbench)
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
        from gym_fed.personalization.writer import remove_variant

        remove_variant(variants_folder(), given.name)
        return {}

    return router


def _licence(workbench: Workbench, model: LocalModel) -> str:
    """Return the licence on the model card; empty if there is none."""
    place = folder_here(model.id) if model.kind in ("package", "cache") else workbench.folder / model.id
    return "" if place is None or place.is_file() else licence_of(place)


def _registry(folder: Path) -> list[dict[str, Any]]:
    """Return the newest versions of the registry's models from `gym models list`.

    A child process reads the registry, since this may be slow and needs torch.

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


def uses_of(workbench: Workbench, model: LocalModel) -> list[str]:
    """Return descriptions of what currently uses a model."""
    uses = [
        f"play has loaded it ({server['base']})"
        for server in servers_of(workbench).facts()
        if server["base"] == model.id
    ]
    place = _place(workbench, model)
    if place.is_dir() and is_held(place):
        uses.append("a run trains in it")
    for job in workbench.jobs.list():
        if job.status == "running" and any(_names(workbench, word, place) for word in job.command[1:]):
            uses.append(f"the job “{job.title}” is running")
    return uses


def is_adapter(workbench: Workbench, model: LocalModel) -> bool:
    """Return True if the model's folder has an adapter without its base."""
    return (_place(workbench, model) / "adapter_config.json").is_file()


def base_of(workbench: Workbench, model: LocalModel, models: Sequence[LocalModel]) -> str | None:
    """Return the id of the model in ``models`` that a run or an adapter was trained from; None if there is none."""
    bases = _bases(_place(workbench, model))
    others = (other for other in models if other.id != model.id)
    match = (
        other.id for other in others if any(_names(workbench, b, _place(workbench, other)) for b in bases)
    )
    return next(match, None)


def dependents_of(workbench: Workbench, model: LocalModel) -> list[str]:
    """Return descriptions of the models and variants whose base is this model."""
    place = _place(workbench, model)
    dependents = []
    for other in local_bases(workbench):
        if other.kind in _MOVABLE and other.id != model.id:
            folder = _place(workbench, other)
            if any(_names(workbench, base, place) for base in _bases(folder)):
                dependents.append(f"{other.kind} {other.id}")
    dependents += [f"variant {row['name']}" for row in local_variants() if row["base_model"] == model.name]
    return dependents


def rename(workbench: Workbench, model: LocalModel, to: str, *, confirmed: bool) -> str:
    """Rename a model in the workbench's folders, and return its new id.

    Raises:
        GymError: ``FILE_EXISTS``; ``USAGE`` for an empty name; errors from ``_require_free``.
    """
    place = _require_free(workbench, model, confirmed)
    if not to or to in (".", "..") or any(sign in to for sign in "/\\\x00") or to.startswith(("-", ".")):
        raise GymError(
            ErrorCode.USAGE,
            f"{to!r} is not a valid folder name",
            "without slashes, and not beginning with . or -",
        )
    if model.kind == "gguf" and not to.endswith(".gguf"):
        to = f"{to}.gguf"
    target = place.with_name(to)
    if os.path.lexists(target):
        raise GymError(ErrorCode.FILE_EXISTS, f"{target} exists", "choose another name")
    place.rename(target)
    return workbench.named(target)


def delete(workbench: Workbench, model: LocalModel, *, confirmed: bool) -> None:
    """Delete the folder of a model in the workbench's folders.

    Raises:
        GymError: Errors from ``_require_free``.
    """
    place = _require_free(workbench, model, confirmed)
    if place.is_symlink() or not place.is_dir():
        place.unlink()
    else:
        shutil.rmtree(place)


def _require_free(workbench: Workbench, model: LocalModel, confirmed: bool) -> Path:
    """Return the path of an unused model.

    Raises:
        GymError: ``PERMISSION_DENIED`` for a model outside the workbench's folders; ``STATE_LOCKED`` for a model in
            use; ``BUSY`` with the names of dependents if there are any and ``confirmed`` is False.
    """
    if model.kind not in _MOVABLE:
        raise GymError(
            ErrorCode.PERMISSION_DENIED,
            f"{model.id} is not in this workbench's folders",
            "models of the Hub's cache are removed with: hf cache delete",
        )
    place = _place(workbench, model)
    if any(root == place or place in root.parents for root in (workbench.folder, workbench.runs)):
        raise GymError(
            ErrorCode.PERMISSION_DENIED,
            f"{model.id} contains the workbench's own folders",
            "start gym webui in the folder above it, with another --runs",
        )
    if uses := uses_of(workbench, model):
        raise GymError(ErrorCode.STATE_LOCKED, f"{model.id} is in use: {'; '.join(uses)}", "end that first")
    depending = dependents_of(workbench, model)
    if depending and not confirmed:
        raise GymError(
            ErrorCode.BUSY, f"{model.id} is the base of {', '.join(depending)}", "confirm to continue anyway"
        )
    return place


def _place(workbench: Workbench, model: LocalModel) -> Path:
    return workbench.folder / model.id


def _names(workbench: Workbench, word: str, place: Path) -> bool:
    """Return True if a word of a command or config is this path or a path below it."""
    if not word or "\x00" in word or len(word) > 4096:
        return False
    named = workbench.folder / os.path.expanduser(word.partition("=")[2] or word)
    named = Path(os.path.normpath(named))
    return named == place or place in named.parents


def _bases(folder: Path) -> list[str]:
    """Return the models that an adapter or a run names as its base."""
    bases = []
    for name, key in (("adapter_config.json", "base_model_name_or_path"), ("config.yaml", "model")):
        try:
            document = (
                read_object(folder / name)
                if name.endswith(".json")
                else parse_value(read_config_text(folder / name))
            )
        except (OSError, GymError, ValueError):
            continue
        if isinstance(document, dict) and isinstance(document.get(key), str):
            bases.append(document[key])
    return bases
