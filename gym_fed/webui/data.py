"""The ``data`` screen: data files with their rows as a model sees them, the registry and the catalogue."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Depends, Query
from pydantic import Field

from gym_fed.base.models import NANO
from gym_fed.config.schema.base import StrictModel
from gym_fed.config.train.catalogue import catalogue
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.core.registries import FORMATS
from gym_fed.data.files import SUFFIXES
from gym_fed.data.paging import is_data_file
from gym_fed.data.registry import DatasetRegistry, default_store
from gym_fed.web.app import Changing, Looking
from gym_fed.web.uploads import Uploads, add_upload_routes
from gym_fed.webui.view_process import ViewProcess
from gym_fed.webui.workbench import MAX_ROWS, Workbench, model_of

UPLOADS_FOLDER = "data"
"""The folder of uploaded files, below the workbench's folder."""
MAX_SMALL_BYTES = 32 * 2**20
"""Maximum size of a file that is searched for duplicates without starting a job."""
_MAX_ENTRIES = 20_000
_MAX_DEPTH = 6
_MAX_PAGE = 50
_MAX_NUMBER = 10**12
_NOT_DATA = {
    "metrics.jsonl",
    "adapter_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "node_modules",
}
"""Names of files and folders that identify the folder of a run, a model or a program."""

Name = Annotated[str, Query(min_length=1, max_length=1000)]


class _Pull(StrictModel):
    reference: str = Field(pattern=r"^[a-z0-9][a-z0-9._/-]{0,128}(@[0-9]{1,6})?$")


class _Dedup(StrictModel):
    name: str = Field(min_length=1, max_length=1000)
    near: float | None = Field(default=0.8, ge=0.3, le=0.99)


def _reading(
    name: Name,
    model: Annotated[str, Query(max_length=300)] = NANO,
    format: Annotated[str, Query(max_length=100)] = "auto",
    columns: Annotated[str, Query(max_length=500)] = "",
    max_length: Annotated[int | None, Query(ge=2, le=10**7)] = None,
    start: Annotated[int, Query(ge=0, le=_MAX_NUMBER)] = 0,
) -> dict[str, Any]:
    """Collect the parameters that all views of a file share."""
    return {
        "name": name,
        "model": model,
        "format": format,
        "columns": columns,
        "max_length": max_length,
        "start": start,
    }


Reading = Annotated[dict[str, Any], Depends(_reading)]


def routes(workbench: Workbench) -> APIRouter:
    """Create the routes below ``/data``."""
    router, rows = APIRouter(), ViewProcess("gym_fed.webui.row_views:RowViews", workbench.folder)
    uploads = Uploads(lambda: workbench.inside(UPLOADS_FOLDER), workbench.named)
    add_upload_routes(router, uploads, rows.begin)

    def ask(view: str, request: dict[str, Any], **more: Any) -> dict[str, Any]:
        name, model = _relative(workbench, request["name"]), model_of(workbench, request["model"])
        return rows.ask({"view": view, **request, "name": name, "model": model, **more})

    @router.get("/data")
    def listed(visitor: Looking) -> dict[str, Any]:
        """List the data files below the workbench's folder."""
        rows.begin()
        return {"folder": str(workbench.folder), **data_files(workbench)}

    @router.get("/data/registry")
    def registry(visitor: Looking) -> dict[str, Any]:
        """List the registry's datasets."""
        store = default_store()
        manifests = DatasetRegistry(store).list()
        return {
            "store": store,
            "datasets": [manifest.model_dump() for manifest in manifests[:MAX_ROWS]],
            "total": len(manifests),
        }

    @router.get("/data/catalogue")
    def entries(visitor: Looking) -> dict[str, Any]:
        """List the catalogue of datasets that configs can name."""
        return {
            "entries": [
                {"name": name, "place": entry.place, **entry.model_dump(include=_SHOWN)}
                for name, entry in catalogue().items()
            ]
        }

    @router.get("/data/rows")
    def page(
        visitor: Looking,
        request: Reading,
        limit: Annotated[int, Query(ge=1, le=_MAX_PAGE)] = 10,
        text: Annotated[str, Query(max_length=200)] = "",
        least: Annotated[int | None, Query(ge=0)] = None,
        most: Annotated[int | None, Query(ge=0)] = None,
        column: Annotated[str, Query(max_length=100)] = "",
        value: Annotated[str, Query(max_length=200)] = "",
        only: Literal["", "problems", "nothing_learnt"] = "",
    ) -> dict[str, Any]:
        """Return the rows from index ``start`` that pass the filters, with their trained tokens."""
        filters = {"text": text, "least": least, "most": most, "column": column, "value": value, "only": only}
        return {**ask("page", request, **filters, limit=limit), "formats": ["auto", *FORMATS.names()]}

    @router.get("/data/row")
    def row(visitor: Looking, request: Reading) -> dict[str, Any]:
        """Return one complete row."""
        return ask("row", request)

    @router.get("/data/lengths")
    def lengths(visitor: Looking, request: Reading) -> dict[str, Any]:
        """Return the token lengths of a part of the file."""
        return ask("lengths", request)

    @router.get("/data/duplicates")
    def duplicates(
        visitor: Looking, request: Reading, near: Annotated[float | None, Query(ge=0.3, le=0.99)] = None
    ) -> dict[str, Any]:
        """Find duplicate rows of a small file, one part at a time."""
        name = _relative(workbench, request["name"])
        if (workbench.folder / name).stat().st_size > MAX_SMALL_BYTES:
            raise GymError(
                ErrorCode.TOO_LARGE,
                f"{name} has more than {MAX_SMALL_BYTES >> 20} MiB",
                "start the search as a job",
            )
        return ask("duplicates", request, near=near)

    @router.post("/data/dedup")
    def dedup(given: _Dedup, visitor: Changing) -> dict[str, Any]:
        """Start `gym data dedup`."""
        name = _relative(workbench, given.name)
        output = _free(workbench.folder, name)
        near = [] if given.near is None else ["--near", str(given.near)]
        command = ["gym", "data", "dedup", f"./{name}", "-o", f"./{output}", *near, "--json"]
        return workbench.jobs.start(command, title=f"Duplicates of {name}", folder=output).facts()

    @router.post("/data/pull")
    def pull(given: _Pull, visitor: Changing) -> dict[str, Any]:
        """Start `gym data pull`."""
        folder = f"data/{given.reference.replace('@', '-')}"
        workbench.inside(folder)
        command = ["gym", "data", "pull", given.reference, folder, "--registry", default_store()]
        return workbench.jobs.start(command, title=f"Pull {given.reference}", folder=folder).facts()

    return router


_SHOWN = {"about", "format", "licence", "rows", "bytes"}


def data_files(workbench: Workbench) -> dict[str, Any]:
    """Return ``{files: [{name, bytes, modified}], total}`` for the workbench's folder."""
    files = sorted(_data_files(workbench.folder), key=lambda path: str(path).casefold())
    return {"files": [_file(workbench.folder, path) for path in files[:MAX_ROWS]], "total": len(files)}


def _data_files(folder: Path) -> Iterator[Path]:
    """Yield the data files below a folder, except those behind links or in folders of runs, models and programs."""
    entries = 0
    for place, folders, files in os.walk(folder):
        depth = len(Path(place).relative_to(folder).parts)
        entries += len(files) + len(folders)
        if entries > _MAX_ENTRIES:
            return
        if depth and not _NOT_DATA.isdisjoint(files):
            folders.clear()
            continue
        folders[:] = sorted(
            name for name in folders if depth < _MAX_DEPTH and name[0] not in "._" and name not in _NOT_DATA
        )
        for name in files:
            path = Path(place, name)
            if name[0] != "." and is_data_file(path) and folder in path.resolve().parents:
                yield path


def _file(folder: Path, path: Path) -> dict[str, Any]:
    status = path.stat()
    name = path.relative_to(folder).as_posix()
    return {"name": name, "bytes": status.st_size, "modified": status.st_mtime}


def _relative(workbench: Workbench, name: str) -> str:
    """Return the name of a data file below the folder. Hidden files and other suffixes are not served.

    Raises:
        GymError: ``PERMISSION_DENIED``; ``FILE_NOT_FOUND``.
    """
    path = workbench.inside(name)
    place = path.relative_to(workbench.folder)
    is_hidden = any(part.startswith(".") for part in place.parts)
    if is_hidden or not path.name.lower().removesuffix(".gz").endswith(SUFFIXES) or not path.is_file():
        raise GymError(ErrorCode.FILE_NOT_FOUND, f"no data file {name!r}", "choose one from the list")
    return place.as_posix()


def _free(folder: Path, name: str) -> str:
    """Return an unused name for the result in the file's folder."""
    stem = name.removesuffix(".gz").rpartition(".")[0] or name
    for number in range(1, 1000):
        candidate = f"{stem}.unique{'' if number == 1 else f'-{number}'}.jsonl"
        if not (folder / candidate).exists():
            return candidate
    raise GymError(ErrorCode.FILE_EXISTS, f"{stem}.unique.jsonl already exists", "remove earlier results")
