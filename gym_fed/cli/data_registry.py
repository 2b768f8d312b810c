"""`gym data push|pull|list`: datasets with a licence, on a folder or an object store that several people share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from gym_fed.console import AsJson, out, print_json, print_result

StoreOption = Annotated[
    str,
    typer.Option(
        "--store", envvar="GYM_DATASETS", help="A folder or fsspec URL, such as s3://bucket/datasets."
    ),
]


def push(
    name: Annotated[str, typer.Argument(help="Such as me/stories.")],
    path: Annotated[Path, typer.Argument(help="A file, or a folder all of whose files are meant.")],
    store: StoreOption,
    licence: Annotated[
        str | None, typer.Option("--licence", help="SPDX identifier, such as CC-BY-4.0, or LicenseRef-NAME.")
    ] = None,
    description: Annotated[str, typer.Option("--description", help="What it is.")] = "",
    as_json: AsJson = False,
) -> None:
    """Publish a file or folder as the next version of a dataset. A licence is needed."""
    from gym_fed.data.registry import DatasetRegistry

    manifest = DatasetRegistry(store).push(name, path, licence=licence, description=description)
    print_result(
        as_json,
        manifest.model_dump(),
        note=f"{name}@{manifest.version}: {len(manifest.files)} files under {manifest.licence}",
    )


def pull(
    reference: Annotated[
        str, typer.Argument(metavar="NAME[@VERSION]", help="The newest version by default.")
    ],
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="Where its files go.")],
    store: StoreOption,
    as_json: AsJson = False,
) -> None:
    """Fetch a dataset, verified; a stopped pull continues, and no file is overwritten."""
    from gym_fed.data.registry import DatasetRegistry

    manifest = DatasetRegistry(store).pull(reference, folder)
    print_result(
        as_json,
        manifest.model_dump(),
        note=f"{manifest.name}@{manifest.version} in {folder}: {len(manifest.files)} files under {manifest.licence}",
    )


def list_datasets(store: StoreOption, as_json: AsJson = False) -> None:
    """List the datasets of a store, each in its newest version."""
    from gym_fed.data.registry import DatasetRegistry

    found = DatasetRegistry(store).list()
    if as_json:
        print_json([manifest.model_dump() for manifest in found])
        return
    for manifest in found:
        size = sum(file.num_bytes for file in manifest.files)
        line = f"{manifest.name}@{manifest.version}  {manifest.licence}  {size} bytes  {manifest.description}"
        out.print(line.rstrip())
