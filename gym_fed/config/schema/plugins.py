"""Record the packages that a config's members come from, so that another machine can require the same.

    plugins_of(config)                        # what the config uses of other packages, with version and digest
    require_plugins(recorded, "the task")     # names a plug-in that is missing or differs
    with only_recorded(recorded, "the task"): # imports no other while untrusted names are read

Recording imports nothing: members are looked up among the installed entry points.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, get_args

from gym_quant.registry import Origin, Registry, checked_by
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from pydantic.fields import FieldInfo

from gym_fed.config.schema.base import StrictModel, first_problem
from gym_fed.config.schema.member import ByMember, MemberOf
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.core.registries import ALL, FEATURES
from gym_fed.core.text import plain

MAX_PLUGINS = 64
"""The plug-in records of one document."""

Word = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,99}$")]


class PluginRecord(StrictModel):
    """A member of another package, as found on the machine that recorded it."""

    kind: Annotated[str, Field(pattern=r"^[a-z][a-z -]{0,39}$")]
    """Kind of the member, as in messages: ``aggregator``."""

    name: Word
    """Name of the member in configs."""

    distribution: Word
    """Name of the package in a package index."""

    version: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9.!+_-]{0,63}$")]
    """Version of the package."""

    digest: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
    """Sha256 over the package's files (``gym_quant.registry.digest_of``)."""


Plugins = Annotated[list[PluginRecord], Field(max_length=MAX_PLUGINS)]


class _RecordedPlugins(BaseModel):
    """The records of a document; its other keys are ignored."""

    model_config = ConfigDict(extra="ignore")

    plugins: Plugins = []


def plugins_of(*models: BaseModel) -> list[PluginRecord]:
    """Return the members of other packages that the configs name, without duplicates, sorted by kind and name.

    Raises:
        GymError: ``MISSING_DEPENDENCY`` if two packages provide the same member, or its name cannot be recorded.
    """
    return records(pair for model in models for pair in members_of(model))


def records(members: Iterable[tuple[Registry[Any], str]]) -> list[PluginRecord]:
    """Return the sorted, unique records of those ``members`` (kind and name) that belong to other packages."""
    by_name = {}
    for kind, name in members:
        origin = kind.origin(name) if name in kind else None
        if origin is not None:
            by_name[kind.kind, name] = _record(kind, name, origin)
    return [by_name[key] for key in sorted(by_name)]


def as_json(recorded: Sequence[PluginRecord]) -> list[dict[str, Any]]:
    """Return records as plain values."""
    return [record.model_dump(mode="json") for record in recorded]


def read_records(values: object, where: str) -> list[PluginRecord]:
    """Read records from untrusted plain values.

    Raises:
        GymError: ``CONFIG_INVALID`` if it is not a list of records.
    """
    try:
        return read_plugins(values)
    except ValidationError as error:
        raise GymError(ErrorCode.CONFIG_INVALID, f"{where}: {plain(first_problem(error))}") from error


def read_plugins(values: object) -> list[PluginRecord]:
    """Read records inside a schema's validator; raises pydantic's ``ValidationError``."""
    return _RecordedPlugins.model_validate({"plugins": values}).plugins


def recorded_in(text: str) -> list[PluginRecord]:
    """Return the readable plug-in records of an untrusted JSON document; empty if there are none.

    Errors in the document or its records are reported by its own schema.
    """
    try:
        return _RecordedPlugins.model_validate_json(text).plugins
    except ValidationError:
        return []


def require_plugins(
    recorded: Sequence[PluginRecord], where: str, used: Sequence[PluginRecord] | None = None
) -> None:
    """Refuse to continue without exactly the recorded plug-ins.

    Args:
        recorded: The records of the document.
        where: Name of the document, at the beginning of messages: "the task".
        used: Plug-ins that this machine would use, all of which must be recorded; None if not known yet.

    Raises:
        GymError: ``MISSING_DEPENDENCY`` naming kind, name, package and versions.
    """
    for record in recorded:
        _require(record, where)
    names = {(record.kind, record.name) for record in recorded}
    for record in used or ():
        if (record.kind, record.name) not in names:
            raise _unrecorded(record, where)


@contextmanager
def only_recorded(recorded: Sequence[PluginRecord], where: str) -> Iterator[None]:
    """Refuse every plug-in that ``where`` names without recording it, before it is imported.

    Wrap it around code that reads untrusted names; ``require_plugins`` first compares the recorded ones.

    Raises:
        GymError: ``MISSING_DEPENDENCY``, as in ``require_plugins``.
    """
    names = {(record.kind, record.name) for record in recorded}

    def check(kind: Registry[Any], name: str) -> None:
        if (kind.kind, name) not in names and (origin := kind.origin(name)) is not None:
            raise _unrecorded(_record(kind, name, origin), where)

    with checked_by(check):
        yield


def _unrecorded(used: PluginRecord, where: str) -> GymError:
    return GymError(
        ErrorCode.MISSING_DEPENDENCY,
        f"{where} lists {used.kind} {used.name!r} without a package, but the installed one is from {used.distribution} "
        f"{used.version}",
        f"remove {used.distribution}, or update gym-fed",
    )


def require_run_plugins(folder: Path) -> None:
    """Refuse to resume a folder's run without the plug-ins that it started with; accept any other folder.

    Raises:
        GymError: ``MISSING_DEPENDENCY``; ``CONFIG_INVALID`` for a broken record.
    """
    file = folder / "run.json"
    if not file.is_file() or (folder / "result.json").exists():
        return
    try:
        recorded = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError):
        return  # the check of the run folder reports it
    if isinstance(recorded, Mapping):
        require_plugins(read_records(recorded.get("plugins", []), str(file)), f"{folder}: the unfinished run")


def _require(record: PluginRecord, where: str) -> None:
    kind = next((kind for kind in ALL if kind.kind == record.kind), None)
    whose = f"{record.distribution} {record.version} (sha256 {record.digest[:12]})"
    need = f"{where} needs {record.kind} {record.name!r} of {whose}"
    remedy = f"pip install {record.distribution}=={record.version}, if you trust it"
    if kind is None:
        raise GymError(
            ErrorCode.MISSING_DEPENDENCY, f"{need}, but this release has no {record.kind}", "update gym-fed"
        )
    if record.name not in kind:
        raise GymError(ErrorCode.MISSING_DEPENDENCY, f"{need}, which is not installed", remedy)
    origin = kind.origin(record.name)
    if origin is None:
        raise GymError(
            ErrorCode.MISSING_DEPENDENCY,
            f"{need}, but on this machine {record.name!r} is gym-fed's own",
            "use the release of gym-fed that it was recorded with",
        )
    if (origin.distribution, origin.version) != (record.distribution, record.version):
        reason = f"{need}, but the installed one is from {origin.distribution} {origin.version}"
        raise GymError(ErrorCode.MISSING_DEPENDENCY, reason, remedy)
    if origin.digest != record.digest:
        raise GymError(
            ErrorCode.MISSING_DEPENDENCY,
            f"{need}, but the installed version has different files (sha256 {origin.digest[:12]})",
            "install it from the same source as the other side, if you trust it",
        )


def _record(kind: Registry[Any], name: str, origin: Origin) -> PluginRecord:
    try:
        return PluginRecord(
            kind=kind.kind,
            name=name,
            distribution=origin.distribution,
            version=origin.version,
            digest=origin.digest,
        )
    except ValidationError as error:
        raise GymError(
            ErrorCode.MISSING_DEPENDENCY,
            f"{kind.kind} {plain(name)!r} of {plain(origin.distribution)} {plain(origin.version)} cannot be recorded: "
            f"{plain(first_problem(error))}",
            "ask the package's author for another name",
        ) from error


def members_of(model: BaseModel) -> Iterator[tuple[Registry[Any], str]]:
    """Yield kind and name of everything that a config names by a ``MemberOf``, and of its ``ByMember`` entries."""
    if isinstance(model, ByMember):
        yield model.member_kind, str(getattr(model, model.member_key))
    for name, field in type(model).model_fields.items():
        yield from _named(getattr(model, name), markers_of(field))
    for key, value in (model.model_extra or {}).items():  # the key of a feature, or the section of a member
        if key in FEATURES:
            yield FEATURES, key
        yield from _named(value, ())


def markers_of(field: FieldInfo) -> list[MemberOf]:
    """Return the kinds of members that a field's value names, at any depth of lists and mappings."""
    return [*_markers(field.metadata), *_markers([field.annotation])]


def _named(value: object, markers: Sequence[MemberOf]) -> Iterator[tuple[Registry[Any], str]]:
    if isinstance(value, BaseModel):
        yield from members_of(value)
    elif isinstance(value, str):
        for marker in markers:
            if value not in marker.also:
                yield from ((kind, str(value)) for kind in marker.kinds)
    elif isinstance(value, Mapping):
        for inner in value.values():
            yield from _named(inner, markers)
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from _named(inner, markers)


def _markers(parts: Iterable[object]) -> Iterator[MemberOf]:
    """Yield the markers in an annotation, at any depth."""
    for part in parts:
        if isinstance(part, MemberOf):
            yield part
        else:
            yield from _markers(getattr(part, "__metadata__", ()))
            yield from _markers(get_args(part))
