"""`gym models`: fetch, publish and list models of the Hub and of registries."""

from __future__ import annotations

import shlex
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gym_fed.cli.models.needed import print_queried_host
from gym_fed.cli.models.registries import (
    AsIsOption,
    BaseOption,
    RegistryOption,
    SignerOption,
    YesOption,
    confirmed,
    keeps,
    of_registry,
    pull_from_registry,
    registered,
    show,
    stated,
    tag,
    verify,
)
from gym_fed.cli.options import refuse_options
from gym_fed.core.console import AsJson, err, print_json, print_result, print_table
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.core.help import App, LicenceOption
from gym_fed.core.text import counted, plain, readable_bytes

if TYPE_CHECKING:
    from gym_fed.registry.manifest import ModelVersion
    from gym_fed.registry.signers import Confirm


class Destination(StrEnum):
    """The destination of `push`."""

    REGISTRY = "registry"
    HF = "hf"


def push(
    name: Annotated[
        str,
        typer.Argument(
            metavar="NAME", help="Name of the model, such as me/stories; with --to hf also NAME@VERSION."
        ),
    ],
    model: Annotated[
        str | None,
        typer.Argument(
            metavar="MODEL",
            help="Model, run or adapter folder, .gymdelta or gym-nano; by default, with --to hf, the registry's NAME.",
        ),
    ] = None,
    registry: RegistryOption = None,
    licence: LicenceOption = None,
    description: Annotated[str | None, typer.Option("--description", help="Short description.")] = None,
    base: BaseOption = None,
    parent: Annotated[
        list[str] | None,
        typer.Option("--parent", metavar="NAME@VERSION", help="Parent version; repeatable."),
    ] = None,
    evals: Annotated[
        list[Path] | None,
        typer.Option(
            "--evals", metavar="PATH", help="A record of gym eval, or a folder of records; repeatable."
        ),
    ] = None,
    label: Annotated[str | None, typer.Option("--tag", metavar="TAG", help="Tag of the new version.")] = None,
    to: Annotated[
        Destination,
        typer.Option("--to", help="Where to publish: a registry, or a folder for the Hugging Face Hub."),
    ] = Destination.REGISTRY,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", metavar="FOLDER", help="--to hf: new folder for the model; required."),
    ] = None,
    repo: Annotated[
        str | None,
        typer.Option(
            "--repo", metavar="OWNER/NAME", help="--to hf: upload the folder to this repository of the Hub."
        ),
    ] = None,
    public: Annotated[bool, typer.Option("--public", help="--repo: make a new repository public.")] = False,
    as_is: Annotated[
        bool, typer.Option("--as-is", help="--to hf: keep a delta as a .gymdelta; do not rebuild its model.")
    ] = False,
    signer: SignerOption = None,
    yes: YesOption = False,
    as_json: AsJson = False,
) -> None:
    """Publish a model as the next version of NAME, signed with your key; no version is ever replaced.

    With --to hf no version is made: a folder in the Hub's layout is written, and uploaded if --repo is given.
    """
    if to is Destination.HF:
        if model is None:
            own = {"--licence": licence, "--description": description, "--parent": parent, "--evals": evals}
            refuse_options({**own, "--tag": label}, "needs MODEL; a version from the registry keeps its own")
            facts = {}
        else:
            refuse_options(
                {"--tag": label, "--parent": parent, "--signer": signer, "--registry": registry},
                "applies only to a registry",
            )
            facts = {"licence": licence, "description": description, "evaluations": evals}
        _push_to_hub(
            name,
            None if model is None else _source(model),
            output,
            facts={key: value for key, value in facts.items() if value is not None},
            registry=registry,
            base=base,
            repo=repo,
            public=public,
            as_is=as_is,
            signer=signer,
            confirm=confirmed(yes),
            as_json=as_json,
        )
        return
    for_hub = {"--output": output, "--repo": repo, "--public": public, "--as-is": as_is}
    refuse_options({**for_hub, "--signer": signer, "--yes": yes}, "needs --to hf")
    if model is None:
        raise GymError(
            ErrorCode.USAGE,
            "no MODEL is given",
            "pass the folder of a model, a run or an adapter, or a .gymdelta",
        )
    from gym_fed.registry import ModelRegistry
    from gym_fed.registry.card.readme import conflicts
    from gym_fed.registry.manifest import NOT_STATED
    from gym_fed.registry.versions import LATEST, require_tag

    if label is not None:
        require_tag(label)
        if label == LATEST:
            raise GymError(
                ErrorCode.USAGE, f"--tag {LATEST}: always refers to the newest version", "leave it out"
            )
    models = ModelRegistry(registry)
    pushed = models.push(
        name,
        _source(model),
        licence=licence or NOT_STATED,
        description=description or "",
        base=base,
        parents=parent or (),
        evaluations=evals or (),
        note=err.print,
    )
    if label is not None:
        models.tag(pushed.reference, label)
    conflicting = conflicts(pushed.manifest)
    place = "" if registry is None else f" --registry {shlex.quote(registry)}"
    for conflict in conflicting:
        err.print(f"warning: {plain(conflict, 500)}")
    document = _document(pushed, models.url, conflicting)
    print_result(
        as_json,
        document,
        f"{pushed.reference} is in {models.url}: {pushed.manifest.kind}, "
        f"{readable_bytes(pushed.manifest.num_bytes)}, licence: {stated(pushed.manifest.licence)}"
        f"{keeps(document['kept'])}",
        note=f"signed by {pushed.signer.fingerprint}; fetch it with: gym models pull {pushed.reference}{place}",
    )


def _document(pushed: ModelVersion, url: str, conflicting: list[str]) -> dict[str, Any]:
    manifest = pushed.manifest
    return {
        "name": pushed.name,
        "version": pushed.version,
        "registry": url,
        "kind": manifest.kind,
        "digest": manifest.digest,
        "bytes": manifest.num_bytes,
        "files": [file.path for file in manifest.files],
        "licence": manifest.licence,
        "signer": pushed.signer.fingerprint,
        "manifest_sha256": pushed.sha256,
        "conflicts": conflicting,
        "kept": None if manifest.kind == "weights" else 1.0,  # adapters and deltas are pushed as they are
    }


def _source(model: str) -> Path:
    from gym_fed.base.models import NANO, nano_path

    source = nano_path() if model == NANO else Path(model).expanduser()
    if not source.exists():
        raise GymError(
            ErrorCode.FILE_NOT_FOUND, f"{model}: no such file or folder", "pass a folder or a .gymdelta"
        )
    return source


def _push_to_hub(
    name: str,
    model: Path | None,
    output: Path | None,
    *,
    facts: dict[str, Any],
    registry: str | None,
    base: str | None,
    repo: str | None,
    public: bool,
    as_is: bool,
    signer: str | None,
    confirm: Confirm | None,
    as_json: bool,
) -> None:
    """Write the folder of a model, or of a registry's version, and upload it if a repository is given.

    Raises:
        GymError: ``USAGE`` without a folder; as in ``hub_folder_of_model``, ``hub_folder_of_version`` and ``upload``.
    """
    from gym_fed.registry import ModelRegistry
    from gym_fed.registry.hub_folder import hub_folder_of_model, hub_folder_of_version, require_upload, upload
    from gym_fed.registry.preparing import StatedFacts

    if output is None:
        raise GymError(ErrorCode.USAGE, "--to hf needs a folder", "pass it with --output FOLDER")
    if public and repo is None:
        raise GymError(ErrorCode.USAGE, "--public needs --repo", "leave it out, or pass the repository")
    if repo is not None:
        require_upload(repo, output)
    if model is None:
        hub_folder = hub_folder_of_version(
            ModelRegistry(registry), name, output, confirm=confirm, signer=signer, base=base, as_is=as_is
        )
    else:
        stated = StatedFacts(base=base, **facts)
        hub_folder = hub_folder_of_model(name, model, output, stated, as_is=as_is, note=err.print)
    for problem in hub_folder.problems:
        err.print(f"warning: {plain(problem, 500)}")
    commit = None if repo is None else upload(hub_folder.folder, repo, public=public)
    place = f"; it is at {commit}" if commit else ""
    print_result(
        as_json,
        {
            "name": name,
            "folder": str(hub_folder.folder),
            "files": hub_folder.files,
            "kind": hub_folder.manifest.kind,
            "problems": hub_folder.problems,
            "repo": repo,
            "commit": commit,
            "kept": hub_folder.kept,
        },
        f"{hub_folder.folder}: {counted(len(hub_folder.files), 'file')} for the Hub{place}{keeps(hub_folder.kept)}",
        note="" if commit else f"upload it with: hf upload OWNER/NAME {hub_folder.folder} .",
    )


app = App(
    help="Fetch models from the Hugging Face Hub and registries, publish your own, and list those on this machine.",
    no_args_is_help=True,
)


@app.command()
def pull(
    name: Annotated[
        str,
        typer.Argument(
            metavar="NAME",
            help="Model of a registry (NAME, NAME@VERSION, NAME:TAG) or of the Hub (Qwen/Qwen3-0.6B).",
        ),
    ],
    registry: RegistryOption = None,
    output: Annotated[
        str | None,
        typer.Option("--output", "-o", metavar="FOLDER", help="New folder for a registry's model."),
    ] = None,
    hub: Annotated[
        bool, typer.Option("--hub", help="Pull from the Hub, even if the registry has the name.")
    ] = False,
    signer: SignerOption = None,
    base: BaseOption = None,
    as_is: AsIsOption = False,
    yes: YesOption = False,
    as_json: AsJson = False,
) -> None:
    """Fetch a model. Files on this machine are not fetched again, and a stopped pull can be resumed.

    A name is looked up in the registry first, then on the Hub.
    """
    if hub and (registry is not None or "@" in name):
        raise GymError(
            ErrorCode.USAGE, "--hub cannot be combined with --registry or a version", "leave one of them out"
        )
    if not hub and of_registry(name, registry):
        pull_from_registry(name, registry, output, signer, base, as_is=as_is, yes=yes, as_json=as_json)
        return
    refuse_options(
        {"--output": output, "--signer": signer, "--base": base, "--as-is": as_is},
        "applies only to models of a registry",
        "pass the registry with --registry, or omit the option",
    )
    from gym_fed.base.downloads import pull_model
    from gym_fed.base.downloads.ensure import consent, progress

    print_queried_host(name)
    with progress() as report:
        offer, folder = pull_model(name, consent=consent(yes), report=report)
    print_result(
        as_json,
        {
            "name": name,
            "from": "hub",
            "commit": offer.commit,
            "folder": str(folder),
            "bytes": offer.total_bytes,
            "fetched_bytes": offer.missing_bytes,
            "licence": offer.licence,
        },
        f"{name} is in {folder}",
        note=f"commit {offer.commit[:12]}; use it as model: {name}",
    )


app.command()(push)


@app.command("list")
def list_(registry: RegistryOption = None, as_json: AsJson = False) -> None:
    """List the models on this machine: gym-nano, those in the Hugging Face cache, imported ones, the registry's."""
    from gym_fed.base.downloads.local import local_models
    from gym_fed.core.console import TextTable

    listed = registered(registry) if registry is not None else [*local_models(), *registered(None)]
    if as_json:
        print_json(listed)
        return
    table = TextTable("name", "where", "bytes", "version", "whole")
    for row in listed:
        version = str(row["version"]) if row["version"] else (row["commit"] or "")[:12]
        whole = row["problem"] or ("yes" if row["whole"] else "no")
        table.add_row(row["name"], row["where"], readable_bytes(row["bytes"]), version, whole)
    print_table(table)
    if not all(row["whole"] or row["where"] == "registry" for row in listed):
        err.print("complete partial models with: gym models pull NAME", style="dim")


app.command()(show)
app.command()(verify)
app.command()(tag)
