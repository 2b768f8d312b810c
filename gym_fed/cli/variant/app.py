"""`gym variant`: the personal variants of a base that `gym api` serves, by hand."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gym_fed import console
from gym_fed.cli.variant.create import create, rebase
from gym_fed.cli.variant.options import (
    KeyOption,
    NameArgument,
    StoreOption,
    open_store,
    signing_key,
)
from gym_fed.cli.variant.wire import hub_app, pull, push
from gym_fed.console import AsJson
from gym_fed.errors import ErrorCode, GymError
from gym_fed.serving.store.folder import store_folder

if TYPE_CHECKING:
    from gym_fed.identity.variant import SignedVariant
    from gym_fed.serving.store.store import VariantStore

app = typer.Typer(
    help="Create, list, check, share and remove personal variants of a base model.", no_args_is_help=True
)
app.command()(create)
app.command()(rebase)
app.command()(push)
app.command()(pull)
app.add_typer(hub_app, name="hub")


@app.command()
def add(
    delta: Annotated[Path, typer.Argument(metavar="DELTA", help="A .gymdelta.")],
    name: Annotated[str, typer.Option("--name", help="What it is served as.")],
    user: Annotated[
        str | None, typer.Option("--user", help="Whose it is; by default the account of the key that signs.")
    ] = None,
    sign: Annotated[
        bool, typer.Option("--sign/--unsigned", help="By default a server refuses unsigned ones.")
    ] = True,
    key: KeyOption = None,
    note: Annotated[str, typer.Option("--note", help="For people: what it was made from.")] = "",
    replace: Annotated[bool, typer.Option("--replace", help="Take the place of the one there is.")] = False,
    store: StoreOption = None,
    as_json: AsJson = False,
) -> None:
    """Add a delta to the store, signed with your own key; a running server has it at once."""
    if not sign and (key is not None or user is None):
        what = "--user says whose it is" if user is None else "--key does not go with it"
        raise GymError(ErrorCode.USAGE, f"--unsigned: {what}", "sign it, or name a user")
    if not delta.is_file():
        raise GymError(ErrorCode.FILE_NOT_FOUND, f"no delta at {delta}")
    signed, owner = None, user or ""
    with open_store(store, create=True, require_signature=sign) as opened:
        if sign:
            signed, owner = _signed(opened, delta, name, user, key, note, replace)
        record = opened.add(delta, signed, name=name, owner=owner, replace=replace, note="" if sign else note)
    console.print_result(as_json, record.to_dict(), f"added {record.name} to {store_folder(store)}")


@app.command("list")
def list_variants(
    user: Annotated[str | None, typer.Option("--user", help="Only those of this owner.")] = None,
    store: StoreOption = None,
    as_json: AsJson = False,
) -> None:
    """List the variants of a store."""
    from gym_fed.tables import TextTable

    with open_store(store) as opened:
        found = list(opened.list(user))
    table = TextTable(
        "variant", "owner", "revision", "base", "bytes", "signed", "note", box=None, pad_edge=False
    )
    for record in found:
        table.add_row(
            record.name,
            record.owner,
            str(record.revision),
            record.base_model,
            f"{record.size_bytes:,}",
            "yes" if record.is_signed else "no",
            record.note,
        )
    console.print_result(as_json, [record.to_dict() for record in found], lambda: console.print_table(table))


@app.command()
def show(name: NameArgument, store: StoreOption = None, as_json: AsJson = False) -> None:
    """Show a variant's record, and where its file is."""
    with open_store(store) as opened:
        record = opened.get(name)
        found = {**record.to_dict(), "file": str(opened.path(name))}
    console.print_result(as_json, found, lambda: _print_fields(found))


@app.command()
def remove(name: NameArgument, store: StoreOption = None, as_json: AsJson = False) -> None:
    """Remove a variant from the store; requests that use it are finished, new ones are refused."""
    with open_store(store) as opened:
        record = opened.remove(name)
    if record is None:
        damaged = {"name": name, "damaged": True}
        console.print_result(
            as_json, damaged, f"removed {name}, whose row was damaged; gym variant gc removes its file"
        )
        return
    console.print_result(
        as_json, record.to_dict(), f"removed {record.name}, revision {record.revision} of {record.owner}"
    )


@app.command()
def verify(
    name: Annotated[str | None, typer.Argument(metavar="[NAME]", help="The variant.")] = None,
    all_: Annotated[bool, typer.Option("--all", help="Every variant of the store.")] = False,
    allow_unsigned: Annotated[
        bool, typer.Option("--allow-unsigned", help="A variant without a signature is in order.")
    ] = False,
    store: StoreOption = None,
    as_json: AsJson = False,
) -> None:
    """Check variants byte by byte: hash, form, base, manifest, signature. The first fault gives the exit code."""
    if (name is None) is not all_:
        raise GymError(ErrorCode.USAGE, "which variant?", "give a NAME, or --all")
    faults: list[GymError] = []
    checked: list[dict[str, Any]] = []
    with open_store(store, require_signature=not allow_unsigned) as opened:
        for one in opened.names() if name is None else [name]:
            try:
                opened.verify(one)
            except GymError as error:
                if name is not None:
                    raise
                faults.append(error)
                checked.append({"name": one, "ok": False, **error.to_dict()})
            else:
                checked.append({"name": one, "ok": True})
            if not as_json:
                problem = f"{faults[-1].message}\n  {faults[-1].hint}" if not checked[-1]["ok"] else "ok"
                console.out.print(f"{one}: {problem}")
    if as_json:
        console.print_json(checked)
    elif faults:
        console.err.print(f"{len(faults)} of {len(checked)} variants are not in order")
    if faults:
        raise typer.Exit(faults[0].exit_code)


@app.command()
def trust(
    user: Annotated[str, typer.Argument(metavar="USER", help="An account's id, or a user id.")],
    public_key: Annotated[str, typer.Argument(metavar="KEY", help="The public key: 64 hex digits.")],
    revoke: Annotated[
        bool, typer.Option("--revoke", help="Refuse what it signed, from now on and for good.")
    ] = False,
    store: StoreOption = None,
    as_json: AsJson = False,
) -> None:
    """Let a key sign variants of a user, as after a rotation; or refuse it for good."""
    if not re.fullmatch(r"[0-9a-f]{64}", public_key):
        raise GymError(ErrorCode.USAGE, f"{public_key[:80]!r} is no public key", "64 hex digits")
    with open_store(store, create=not revoke) as opened:
        act = opened.revoke if revoke else opened.trust
        act(user, bytes.fromhex(public_key))
    verdict = "is refused from now on" if revoke else "may sign"
    console.print_result(
        as_json,
        {"user": user, "public_key": public_key, "trusted": not revoke},
        f"key {public_key[:16]} {verdict} for {user}",
    )


@app.command()
def gc(store: StoreOption = None, as_json: AsJson = False) -> None:
    """Remove files that no variant has: what a killed add or remove left."""
    with open_store(store) as opened:
        files, size = opened.gc()
    console.print_result(as_json, {"files": files, "bytes": size}, f"removed {files} files of {size:,} bytes")


def _signed(
    store: VariantStore,
    delta: Path,
    name: str,
    user: str | None,
    key: Path | None,
    note: str,
    replace: bool,
) -> tuple[SignedVariant, str]:
    """The manifest, signed as the revision after the present one, and the owner."""
    from gym_fed.serving.store.records import is_account
    from gym_fed.serving.store.signing import sign_variant

    signer = signing_key(key)
    owner = user or signer.contributor
    if is_account(owner):
        signer = signer.of_account(
            owner
        )  # a rotated account's newer key signs for it, where the store knows it
    revision = 1
    if replace:
        try:
            revision = store.get(name).revision + 1
        except GymError as error:
            if error.code is not ErrorCode.NOT_FOUND:
                raise
    return sign_variant(delta, signer, name=name, revision=revision, note=note), owner


def _print_fields(found: dict[str, Any]) -> None:
    for key, value in found.items():
        console.out.print(f"{key:<13}{'-' if value is None else value}")
