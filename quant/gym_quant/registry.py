"""Registries of plug-in classes: built-in ones by file name, those of other packages by entry point.

    CODECS = Registry("codec", "gym_quant.codecs", "gym_quant.codec:Codec", "gym_fed.codecs")
    CODECS.names()          # ('binary', 'bitdelta', ...): nothing is imported
    CODECS.type_of("int4")  # the class

Another package adds a member by an entry point, without changes here::

    [project.entry-points."gym_fed.codecs"]
    nf4 = "my_package.nf4:Nf4"

This module does not import torch.
"""

from __future__ import annotations

import functools
import hashlib
import importlib
import pkgutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar, cast

from gym_quant.errors import CodecError

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

    from gym_quant.codec import Codec

T = TypeVar("T")

GROUPS = "gym_fed."
"""Prefix of the names of all entry point groups."""

_NEVER = ("base", "registry")


class MemberError(ValueError):
    """A member that is unknown, provided twice, or cannot be imported; the message names a remedy."""


@dataclass(frozen=True)
class Origin:
    """The package that provides a member that is not built in.

    Attributes:
        distribution: The installed package's name in a package index.
        version: Its version.
        digest: Lower-case hex sha256 over the files of the module's top-level package (``digest_of``).
    """

    distribution: str
    version: str
    digest: str


class Registry(Generic[T]):
    """The members of one kind.

    Args:
        kind: Name of a member in messages, such as ``codec``.
        package: Folder of the built-in members, as a dotted name. Each file in it or its subfolders, except ``base``,
            ``registry`` and names that begin with ``_``, defines one public subclass of ``base`` and has its name.
        base: ``module:Class``, imported with the first member.
        group: Entry point group; it begins with ``gym_fed.``.
    """

    def __init__(self, kind: str, package: str, base: str, group: str) -> None:
        if not group.startswith(GROUPS):
            raise ValueError(f"group {group!r} does not begin with {GROUPS!r}")
        self.kind, self.package, self.base, self.group = kind, package, base, group
        self._types: dict[str, type[T]] = {}

    def names(self) -> tuple[str, ...]:
        """Return the sorted names of all built-in and installed members without importing any."""
        return tuple(sorted({*self.own(), *self._plugins()}))

    def own(self) -> tuple[str, ...]:
        """Return the sorted names of built-in members."""
        return tuple(_files(self.package))

    def own_with(self, fact: str) -> tuple[str, ...]:
        """Import the built-in members and return the sorted names of those whose attribute ``fact`` is true."""
        return tuple(name for name in self.own() if getattr(self.type_of(name), fact))

    def __contains__(self, name: object) -> bool:
        # Cached, since encoding LoRA factors looks up thousands of names, and listing entry points takes milliseconds.
        return name in self.own() or name in self._plugins()

    def type_of(self, name: str) -> type[T]:
        """Return the class of the member ``name``.

        Raises:
            MemberError: If there is none. For a member of another package: if two packages provide it, it is not a
                complete subclass of the kind's base, or its import fails.
            Exception: Any error of the check set by ``checked_by``.
        """
        self.require_allowed(name)
        if name not in self._types:
            self._types[name] = self._own(name) if name in self.own() else self._foreign(name)
        return self._types[name]

    def require_allowed(self, name: str) -> None:
        """Run the check of ``checked_by`` on a member of another package; imports nothing."""
        check = _check.get()
        if check is not None and name not in self.own():
            check(self, name)

    def origin(self, name: str) -> Origin | None:
        """Return the package that provides a member; None for a built-in one.

        Raises:
            MemberError: If there is no such member, or two packages provide it.
        """
        if name in self.own():
            return None
        point = self._point(name)
        assert point.dist is not None
        return Origin(point.dist.name, point.dist.version, digest_of(point.module))

    def shadowed(self) -> tuple[EntryPoint, ...]:
        """Return the entry points ignored because a built-in member has their name; `gym doctor` lists them."""
        own = self.own()
        return tuple(point for point in _installed(self.group) if point.name in own)

    def unknown(self, name: str) -> Exception:
        """Return the error for an unknown name."""
        return MemberError(f"unknown {self.kind} {name!r} (known: {', '.join(self.names())})")

    def broken(self, name: str, message: str, hint: str) -> Exception:
        """Return the error for an unusable member ``name`` of another package."""
        return MemberError(f"{message}; {hint}")

    def _own(self, name: str) -> type[T]:
        module = importlib.import_module(_files(self.package)[name])
        base = self._base()
        classes = [
            value
            for key, value in vars(module).items()
            if isinstance(value, type)
            and issubclass(value, base)
            and value.__module__ == module.__name__
            and not key.startswith("_")
        ]
        if len(classes) != 1 or getattr(classes[0], "name", name) != name:
            raise TypeError(
                f"{module.__file__} must define one {base.__name__} named {name!r}, not "
                f"{[c.__name__ for c in classes]}"
            )
        return cast("type[T]", classes[0])

    def _foreign(self, name: str) -> type[T]:
        point, base = self._point(name), self._base()
        assert point.dist is not None
        whose = f"{self.kind} {name!r} of {point.dist.name} {point.dist.version}"
        try:
            member = point.load()
        except (Exception, SystemExit) as error:  # a module of another package may raise any exception
            raise self.broken(
                name, f"{whose} cannot be imported: {error!r}", f"repair or remove {point.dist.name}"
            ) from error
        if (
            not (isinstance(member, type) and issubclass(member, base))
            or getattr(member, "name", name) != name
        ):
            raise self.broken(
                name,
                f"{whose}: {point.value} is not a {base.__name__} named {name!r}",
                f"repair or remove {point.dist.name}",
            )
        missing = ", ".join(sorted(getattr(member, "__abstractmethods__", ())))
        if missing:
            raise self.broken(
                name, f"{whose}: {point.value} lacks {missing}", f"repair or remove {point.dist.name}"
            )
        return cast("type[T]", member)

    def _point(self, name: str) -> EntryPoint:
        points = self._plugins().get(name, ())
        if not points:
            raise self.unknown(name)
        if len(points) > 1:
            owners = " and ".join(sorted(p.dist.name for p in points if p.dist is not None))
            raise self.broken(name, f"{self.kind} {name!r} is defined by {owners}", "remove one of them")
        return points[0]

    def _plugins(self) -> dict[str, list[EntryPoint]]:
        own = self.own()
        points: dict[str, list[EntryPoint]] = {}
        for point in _installed(self.group):
            if point.name not in own:
                points.setdefault(point.name, []).append(point)
        return points

    def _base(self) -> type:
        module, _, name = self.base.partition(":")
        return cast("type", getattr(importlib.import_module(module), name))


@contextmanager
def checked_by(check: Check) -> Iterator[None]:
    """Call ``check`` with kind and name before members of other packages are imported or used, inside this context.

    ``check`` raises to prevent their use. This protects code that reads untrusted names, such as those in a hub's task.
    """
    token = _check.set(check)
    try:
        yield
    finally:
        _check.reset(token)


def digest_of(module: str) -> str:
    """Hash the files of a module's top-level package with sha256: sorted paths and contents, without bytecode."""
    spec = find_spec(module.partition(".")[0])
    digest = hashlib.sha256()
    for path, file in sorted(_sources(spec)) if spec is not None else ():
        content = hashlib.sha256(file.read_bytes()).hexdigest()
        digest.update(f"{path}\0{content}\n".encode())
    return digest.hexdigest()


def _sources(spec: ModuleSpec) -> list[tuple[str, Path]]:
    if spec.submodule_search_locations is None:
        return [] if spec.origin is None else [(Path(spec.origin).name, Path(spec.origin))]
    return [
        (file.relative_to(root).as_posix(), file)
        for root in map(Path, spec.submodule_search_locations)
        for file in root.rglob("*")
        if file.is_file() and "__pycache__" not in file.parts
    ]


@functools.cache
def _files(package: str) -> dict[str, str]:
    """Return sorted member names with their modules, from the files of ``package`` and its subfolders.

    Nothing is imported.
    """
    spec = find_spec(package)
    folders = [] if spec is None else [Path(path) for path in spec.submodule_search_locations or ()]
    modules: dict[str, str] = {}
    for name, is_folder in _modules(folders):
        inside = _modules([folder / name for folder in folders]) if is_folder else []
        members = [(member, f"{package}.{name}.{member}") for member, _ in inside]
        for member, module in members if is_folder else [(name, f"{package}.{name}")]:
            if member in modules:
                raise TypeError(f"{member} is both {modules[member]} and {module}")
            modules[member] = module
    return dict(sorted(modules.items()))


def _modules(folders: list[Path]) -> list[tuple[str, bool]]:
    """Return the modules in ``folders`` that may be or contain members, each with a flag for folders."""
    return [
        (info.name, info.ispkg)
        for info in pkgutil.iter_modules(map(str, folders))
        if info.name not in _NEVER and not info.name.startswith("_")
    ]


def _installed(group: str) -> tuple[EntryPoint, ...]:
    """Return a group's entry points in all packages."""
    return _all_installed().get(group, ())


@functools.cache
def _all_installed() -> dict[str, tuple[EntryPoint, ...]]:
    """Return the entry points of each of this project's groups, read once per process."""
    from importlib.metadata import entry_points  # slow to import, and `--help` reads no registry

    points: Any = entry_points()  # classes differ between Python 3.11 and 3.12
    return {group: tuple(points.select(group=group)) for group in points.groups if group.startswith(GROUPS)}


Check = Callable[[Registry[Any], str], None]

_check: ContextVar[Check | None] = ContextVar("_check", default=None)

CODECS: Registry[Codec] = Registry("codec", "gym_quant.codecs", "gym_quant.codec:Codec", "gym_fed.codecs")
LINEARS: Registry[Any] = Registry(
    "linear format", "gym_quant.linears", "gym_quant.linear:PackedLinear", "gym_fed.linears"
)


def codec_names() -> tuple[str, ...]:
    """Return the sorted names of all codecs."""
    return CODECS.names()


@functools.cache
def get_codec(name: str) -> Codec:
    """Return the codec named ``name``.

    Raises:
        CodecError: If it does not exist.
    """
    try:
        return CODECS.type_of(name)()
    except MemberError as error:
        raise CodecError(str(error)) from error
