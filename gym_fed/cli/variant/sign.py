"""`gym variant sign`: what an owner signs, written next to a delta, for a server that adds it over HTTP."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from gym_fed.cli.variant.options import KeyOption, signing_key
from gym_fed.core import console
from gym_fed.core.console import AsJson
from gym_fed.core.errors import ErrorCode, GymError


def sign(
    delta: Annotated[Path, typer.Argument(metavar="DELTA", help="A .gymdelta file.")],
    name: Annotated[str, typer.Option("--name", metavar="NAME", help="Name of the variant.")],
    key: KeyOption = None,
    revision: Annotated[
        int,
        typer.Option(
            "--revision", min=1, help="Revision number; higher than that of the variant it replaces."
        ),
    ] = 1,
    note: Annotated[str, typer.Option("--note", help="Note for people, such as what it was made from.")] = "",
    as_json: AsJson = False,
) -> None:
    """Sign a delta for a server that adds variants over HTTP; the manifest is written next to it."""
    from gym_fed.core.files import write_atomically
    from gym_fed.serving.openai.adapters import manifest_path
    from gym_fed.serving.store.signing import sign_variant

    if not delta.is_file():
        raise GymError(ErrorCode.FILE_NOT_FOUND, f"no delta at {delta}")
    signed = sign_variant(delta, signing_key(key), name=name, revision=revision, note=note)
    path = manifest_path(delta)
    write_atomically(path, f"{signed.to_json()}\n".encode(), mode=0o644)
    found = {"name": name, "revision": revision, "owner": signed.manifest.owner, "manifest": str(path)}
    console.print_result(as_json, found, f"signed {name}, revision {revision}: {path}")
