"""Whose code a document needs beside ours: members of installed packages, by distribution, version and digest."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from gym_quant.registry import Origin, Registry
from pydantic import Field

from gym_fed import kinds
from gym_fed.config.base import StrictModel
from gym_fed.errors import ErrorCode, GymError

MOST = 64
"""Plug-ins of one document."""


class Plugin(StrictModel):
    """A member of an installed package, as it was where the document was written."""

    kind: str = Field(max_length=64)
    """The registry's word for it: ``algorithm``."""

    name: str = Field(max_length=128)
    distribution: str = Field(max_length=128)
    version: str = Field(max_length=64)
    digest: str = Field(pattern=r"^[0-9a-f]{64}$")
    """Sha256 over the files of its top-level package."""


def plugins_among(named: Iterable[tuple[Registry[Any], str]]) -> list[Plugin]:
    """Those of ``named`` that are not ours; words that name no member, such as ``none``, are passed over."""
    found = []
    for kind, name in named:
        origin = kind.origin(name) if name in kind else None
        if origin is not None:
            found.append(Plugin(kind=kind.kind, name=name, **vars(origin)))
    return found


def require_plugins(plugins: Sequence[Plugin]) -> None:
    """Refuse to go on without the very code that a document names.

    Raises:
        GymError: ``MISSING_DEPENDENCY`` naming the member, the distribution and the version.
    """
    for plugin in plugins:
        here = _here(plugin)
        if here == Origin(plugin.distribution, plugin.version, plugin.digest):
            continue
        wanted = f"{plugin.kind} {plugin.name!r} of {plugin.distribution} {plugin.version}"
        if here is None:
            problem = "which is not installed"
        elif (here.distribution, here.version) == (plugin.distribution, plugin.version):
            problem = f"and what is installed under that version has other files (sha256 {here.digest[:12]})"
        else:
            problem = f"and here it is of {here.distribution} {here.version}"
        raise GymError(
            ErrorCode.MISSING_DEPENDENCY,
            f"needs the {wanted} (sha256 {plugin.digest[:12]}), {problem}",
            f"install {plugin.distribution} {plugin.version}, if you trust it",
        )


def _here(plugin: Plugin) -> Origin | None:
    kind = next((kind for kind in kinds.ALL if kind.kind == plugin.kind), None)
    return kind.origin(plugin.name) if kind is not None and plugin.name in kind else None
