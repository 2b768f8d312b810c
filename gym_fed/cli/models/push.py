"""`gym models push`: publish a model in a registry."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from gym_fed.cli.models.registries import BaseOption, RegistryOption, stated
from gym_fed.console import AsJson, err, print_result
from gym_fed.errors import ErrorCode, GymError
from gym_fed.text import readable_bytes


def push(
    name: Annotated[str, typer.Argument(metavar="NAME", help="Such as me/stories; the next version of it.")],
    model: Annotated[
        str, typer.Argument(metavar="MODEL", help="Folder of a model, a run or an adapter; or a .gymdelta.")
    ],
    registry: RegistryOption = None,
    licence: Annotated[
        str | None,
        typer.Option("--licence", help="SPDX identifier, such as Apache-2.0.", show_default="not stated"),
    ] = None,
    description: Annotated[str, typer.Option("--description", help="A few words on what it is for.")] = "",
    base: BaseOption = None,
    parent: Annotated[
        list[str] | None,
        typer.Option("--parent", metavar="NAME@VERSION", help="Made from this version; may be repeated."),
    ] = None,
    evals: Annotated[
        Path | None, typer.Option("--evals", metavar="FOLDER", help="Records of gym eval that go along.")
    ] = None,
    label: Annotated[str | None, typer.Option("--tag", metavar="TAG", help="Put this tag on it.")] = None,
    as_json: AsJson = False,
) -> None:
    """Publish a model as the next version of NAME, signed with your key; no version is ever replaced."""
    from gym_fed.registry import ModelRegistry
    from gym_fed.registry.card.conflicts import conflicts
    from gym_fed.registry.card.evaluations import records_in
    from gym_fed.registry.manifest import NOT_STATED
    from gym_fed.registry.versions import LATEST, require_tag

    if label is not None:
        require_tag(label)
        if label == LATEST:
            raise GymError(ErrorCode.USAGE, f"--tag {LATEST}: always is the newest version", "leave it out")
    records = []
    if evals is not None:
        if not evals.is_dir():
            raise GymError(
                ErrorCode.FILE_NOT_FOUND, f"--evals {evals}: no such folder", "gym eval writes one"
            )
        records = records_in(evals)
    source = Path(model).expanduser()
    if not source.exists():
        raise GymError(
            ErrorCode.FILE_NOT_FOUND, f"{model}: no such file or folder", "give a folder or a .gymdelta"
        )
    models = ModelRegistry(registry)
    pushed = models.push(
        name,
        source,
        licence=licence or NOT_STATED,
        description=description,
        base=base,
        parents=parent or (),
        evaluations=records,
    )
    if label is not None:
        models.tag(pushed.reference, label)
    manifest, found = pushed.manifest, conflicts(pushed.manifest)
    for conflict in found:
        err.print(f"look at: {conflict}")
    print_result(
        as_json,
        {
            "name": pushed.name,
            "version": pushed.version,
            "registry": models.url,
            "kind": manifest.kind,
            "digest": manifest.digest,
            "bytes": manifest.num_bytes,
            "files": [file.path for file in manifest.files],
            "licence": manifest.licence,
            "signer": pushed.signer.fingerprint,
            "manifest_sha256": pushed.sha256,
            "conflicts": found,
        },
        f"{pushed.reference} is in {models.url}: {manifest.kind}, {readable_bytes(manifest.num_bytes)}, licence: "
        f"{stated(manifest.licence)}",
        note=f"signed by {pushed.signer.fingerprint}; fetch it with: gym models pull {pushed.reference}",
    )
