"""`gym models` on a registry: pull, show, verify and tag. A new signer's fingerprint must be confirmed."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gym_fed.cli.models.needed import ensure_models
from gym_fed.core.console import AsJson, err, out, print_columns, print_json, print_result
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.core.text import counted, plain, readable_bytes

if TYPE_CHECKING:
    from gym_fed.registry.manifest import ModelVersion, Signer
    from gym_fed.registry.models import ModelRegistry
    from gym_fed.registry.signers import Confirm

RegistryOption = Annotated[
    str | None,
    typer.Option(
        "--registry",
        metavar="URL",
        help="A folder or an fsspec URL, such as s3://bucket/models.",
        show_default="$GYM_MODELS, or models in ~/.gym-fed",
    ),
]
SignerOption = Annotated[
    str | None,
    typer.Option(
        "--signer", metavar="FINGERPRINT", help="Fingerprint of the key that must have signed it, sha256:..."
    ),
]
BaseOption = Annotated[
    str | None,
    typer.Option("--base", metavar="MODEL", help="The base model, if it is not found by its name."),
]
AsIsOption = Annotated[
    bool, typer.Option("--as-is", help="Keep a delta as a .gymdelta; do not rebuild its model.")
]
YesOption = Annotated[
    bool,
    typer.Option(
        "--yes",
        "-y",
        help="Accept an unknown signer the first time (its key is pinned), and downloads from the Hub.",
    ),
]
_Reference = Annotated[str, typer.Argument(metavar="NAME", help="Model: NAME, NAME@VERSION or NAME:TAG.")]


def of_registry(name: str, registry: str | None) -> bool:
    """Return True if a name belongs to the registry: a URL is given, the name has a version or tag, or the registry has
    it."""
    from gym_fed.registry import ModelRegistry

    if registry is not None or "@" in name or ":" in name:
        return True
    return ModelRegistry().has(name)


def pull_from_registry(
    name: str,
    url: str | None,
    output: str | None,
    signer: str | None,
    base: str | None,
    *,
    as_is: bool,
    yes: bool,
    as_json: bool,
) -> None:
    """Fetch a version, and rebuild its model if it is a delta."""
    from gym_fed.registry import ModelRegistry

    registry = ModelRegistry(url)
    confirm = confirmed(yes)
    version = registry.trusted(name, confirm=confirm, signer=signer)
    err.print(
        f"{version.reference} of the registry {registry.url}: {readable_bytes(version.manifest.num_bytes)} in "
        f"{counted(len(version.manifest.files), 'file')}, licence: {stated(version.manifest.licence)}"
    )
    _ensure_base(registry, version, base, as_is, yes)
    pulled = registry.fetch(version.reference, output, confirm=confirm, base=base, as_is=as_is)
    note = f"use it as model: {pulled.folder}"
    if version.manifest.base is not None and version.manifest.kind == "adapter" and pulled.base is None:
        note += f"; its base is not on this machine: gym models pull {plain(version.manifest.base.name, 120)}"
    print_result(
        as_json,
        {
            "name": version.name,
            "from": "registry",
            "registry": registry.url,
            "version": version.version,
            "kind": version.manifest.kind,
            "folder": str(pulled.folder),
            "bytes": version.manifest.num_bytes,
            "fetched": pulled.fetched,
            "licence": version.manifest.licence,
            "signer": version.signer.fingerprint,
            "base": pulled.base,
            "kept": pulled.kept,
        },
        f"{version.reference} is in {pulled.folder}{keeps(pulled.kept)}",
        note=note,
    )


def keeps(share: float | None) -> str:
    """Return the end of a sentence on the share of a delta in what was written; empty for weights."""
    return "" if share is None else f"; keeps {share:.1%} of the delta"


def _ensure_base(
    registry: ModelRegistry, version: ModelVersion, given: str | None, as_is: bool, yes: bool
) -> None:
    """Offer to download the base of a delta from the Hub if it is neither on this machine nor in the registry."""
    from gym_fed.base.models import is_hub_name

    base = version.manifest.base
    if base is None or version.manifest.kind != "delta" or as_is or given is not None:
        return
    if not registry.has_base(version) and is_hub_name(base.name):
        ensure_models([base.name], yes)


def show(name: _Reference, registry: RegistryOption = None, as_json: AsJson = False) -> None:
    """Show a version: files, base, lineage, licences, signer, tags."""
    from gym_fed.registry import ModelRegistry
    from gym_fed.registry.card.readme import conflicts

    models = ModelRegistry(registry)
    version = models.show(name)
    tags = models.tags(version.name)
    pinned = models.is_pinned(version)
    document = {
        **version.manifest.model_dump(mode="json"),
        "manifest_sha256": version.sha256,
        "signer": version.signer.fingerprint,
        "signer_is_trusted": pinned,
        "versions": models.versions(version.name),
        "tags": tags,
        "conflicts": conflicts(version.manifest),
    }
    print_result(
        as_json, document, lambda: _print_version(version, pinned, tags, conflicts(version.manifest))
    )


def verify(
    name: _Reference,
    registry: RegistryOption = None,
    signer: SignerOption = None,
    yes: YesOption = False,
    as_json: AsJson = False,
) -> None:
    """Check a version in its store: signature, signer, and the sha256 of every file."""
    from gym_fed.registry import ModelRegistry

    version, damaged = ModelRegistry(registry).verify(name, confirm=confirmed(yes), signer=signer)
    if damaged:
        first = damaged[0]
        raise GymError(
            ErrorCode.HASH_MISMATCH,
            f"{version.reference}: differs from the signed content: {len(damaged)} of "
            f"{counted(len(version.manifest.files), 'file')}; "
            f"{first.path}: {first.problem}",
            "remove those objects from the store, and push the version's files again",
        )
    print_result(
        as_json,
        {
            "name": version.name,
            "version": version.version,
            "signer": version.signer.fingerprint,
            "files": len(version.manifest.files),
            "bytes": version.manifest.num_bytes,
        },
        f"{version.reference}: {counted(len(version.manifest.files), 'file')}, "
        f"{readable_bytes(version.manifest.num_bytes)}: as signed by {version.signer.fingerprint}",
    )


def tag(
    name: _Reference,
    label: Annotated[
        str | None, typer.Argument(metavar="TAG", help="Tag, such as stable; by default all are listed.")
    ] = None,
    remove: Annotated[bool, typer.Option("--remove", help="Remove the tag.")] = False,
    registry: RegistryOption = None,
    as_json: AsJson = False,
) -> None:
    """Tag a version, or list the tags of a model with their history. A tag can move; its history stays."""
    from gym_fed.registry import ModelRegistry
    from gym_fed.registry.versions import split_reference

    models = ModelRegistry(registry)
    model, _, _ = split_reference(name)
    if label is None:
        if remove:
            raise GymError(ErrorCode.USAGE, "--remove needs a tag", "gym models tag NAME TAG --remove")
        _list_tags(models, model, as_json)
        return
    if remove:
        models.untag(model, label)
        print_result(
            as_json, {"name": model, "tag": label, "version": None}, f"{model} no longer has a tag {label}"
        )
        return
    moved = models.tag(name, label)
    print_result(
        as_json,
        {"name": model, "tag": label, "version": moved.version},
        f"{model}:{label} is {model}@{moved.version}",
    )


def _list_tags(models: ModelRegistry, model: str, as_json: bool) -> None:
    from gym_fed.registry.versions import LATEST

    tags = models.tags(model)
    if not tags:
        models.show(model)  # reports that there is no such model
    history = {
        label: [
            {"number": m.number, "version": m.version, "at": m.created_at, "signer": signer.fingerprint}
            for m, signer in models.history(model, label)
        ]
        for label in models.all_tags(model)
    }
    if as_json:
        print_json({"name": model, "tags": tags, "history": history})
        return
    out.print(f"{LATEST}  version {tags[LATEST]}, always the newest")
    for label, moves in history.items():
        past = ", ".join(f"{_day(move['at'])} {_version_text(move['version'])}" for move in moves)
        out.print(f"{label}  {_version_text(tags.get(label))}  ({past})")


def _version_text(version: Any) -> str:
    return "removed" if version is None else f"version {version}"


def _day(seconds: Any) -> str:
    return time.strftime("%Y-%m-%d %H:%M", time.gmtime(seconds))


def registered(url: str | None) -> list[dict[str, Any]]:
    """Return the newest version of every model in a registry; for a damaged one, the error.

    Raises:
        GymError: ``NOT_FOUND`` if a registry is named and does not exist.
    """
    from gym_fed.registry import ModelRegistry

    models = ModelRegistry(url)
    names = models.names()
    if url is not None and not names:
        models.require_there()
        err.print(f"the registry {models.url} has no models yet")
    rows = []
    for name in names:
        row: dict[str, Any] = {"name": name, "where": "registry", "commit": None, "folder": None}
        try:
            newest = models.show(name)
            size, version, problem = newest.manifest.num_bytes, newest.version, None
        except GymError as error:
            size, version, problem = 0, models.versions(name)[-1], error.code.value
        rows.append({**row, "bytes": size, "version": version, "whole": problem is None, "problem": problem})
    return rows


def confirmed(yes: bool) -> Confirm | None:
    """Return a function that confirms a signer: a prompt, or True with ``--yes``; None without a terminal."""
    if not yes and not (sys.stdin.isatty() and err.is_terminal):
        return None

    def ask(what: str, signer: Signer) -> bool:
        err.print(f"{what} is signed by a key that is new for this model: {signer.fingerprint}")
        by = "--yes accepts it: it is pinned" if yes else "It would be pinned"
        err.print(
            f"{by}, and only this key is accepted from then on. Compare it with what its author published."
        )
        return yes or typer.confirm("Is this the right key?", err=True)

    return ask


def stated(licence: str) -> str:
    """Return a licence, or "not stated"."""
    from gym_fed.registry.manifest import NOT_STATED

    return "not stated" if licence == NOT_STATED else plain(licence)


def _print_version(model: ModelVersion, pinned: bool, tags: dict[str, int], conflicting: list[str]) -> None:
    manifest, lineage = model.manifest, model.manifest.lineage
    rows = [
        ("model", model.reference),
        ("kind", manifest.kind),
        ("licence", stated(manifest.licence)),
        ("signed by", f"{model.signer.fingerprint} ({'trusted' if pinned else 'not yet trusted'})"),
        ("pushed", f"{_day(manifest.created_at)} UTC"),
        ("tags", ", ".join(label for label, version in tags.items() if version == model.version) or "none"),
    ]
    if manifest.digest is not None:
        rows.append(("digest", manifest.digest))
    if manifest.base is not None:
        base = manifest.base
        there = f", {base.version} in the same registry" if base.version else ""
        rows.append(("base", f"{plain(base.name)} ({base.digest or 'digest not stated'}{there})"))
        rows.append(("base's licence", stated(base.licence)))
    rows += [("made from", plain(parent.version)) for parent in lineage.parents]
    rows += [("soup", soup) for soup in lineage.soups[-3:]]
    if lineage.global_version is not None:
        rows.append(("global version", lineage.global_version))
    rows += [
        ("data", f"{plain(dataset.name)}, licence: {plain(dataset.licence or 'not stated')}")
        for dataset in lineage.data
    ]
    if lineage.method:
        rows.append(("trained by", plain(lineage.method)))
    rows += [("file", f"{file.path}  {readable_bytes(file.num_bytes)}") for file in manifest.files[:40]]
    if len(manifest.files) > 40:
        rows.append(("", f"and {counted(len(manifest.files) - 40, 'more file')}"))
    if manifest.description:
        rows.append(("about", plain(manifest.description)))
    print_columns(rows, indent="")
    for conflict in conflicting:
        err.print(f"warning: {plain(conflict, 500)}")
