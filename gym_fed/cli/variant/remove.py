"""`gym variant remove` and `gym variant receipt verify`: delete a variant, also on hubs, and check its receipt."""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from gym_client.cli.options import HomeFolder, Insecure, PassphraseFile

from gym_fed.cli.variant.options import (
    KeyOption,
    NameArgument,
    StoreOption,
    open_store,
    owners_key,
    signing_key,
)
from gym_fed.core import console
from gym_fed.core.console import AsJson
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.core.help import App
from gym_fed.core.text import counted, plain

if TYPE_CHECKING:
    from gym_fed.config.serving import ServingConfig
    from gym_fed.personalization.writer import LocalRemoval
    from gym_fed.serving.store.records import VariantRecord
    from gym_fed.serving.store.store import VariantStore
    from gym_fed.trust.identity.variant import HubRemoval, SignedRemoval, VariantRemoval


RECEIPTS = "receipts"

receipt_app = App(help="Check the receipts of removed variants.", no_args_is_help=True)


def remove(
    name: NameArgument,
    everywhere: Annotated[
        bool, typer.Option("--everywhere", help="Also remove it from every hub that this home has joined.")
    ] = False,
    receipt: Annotated[
        Path | None,
        typer.Option("--receipt", metavar="FILE", help="File for the receipt.", show_default="the store"),
    ] = None,
    serving: Annotated[
        Path | None,
        typer.Option(
            "--serving",
            metavar="FILE",
            help="Config of gym api: also clean its usage log and its keys.",
            show_default=False,
        ),
    ] = None,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not prompt.")] = False,
    key: KeyOption = None,
    store: StoreOption = None,
    home: HomeFolder = None,
    passphrase_file: PassphraseFile = None,
    insecure: Insecure = False,
    as_json: AsJson = False,
) -> None:
    """Remove a variant: all revisions, their files and unfinished work. A signed receipt lists what was removed.

    Running requests for the variant finish; new ones are refused. Hubs come first: if one cannot be reached, nothing is
    removed on this machine. Run the same command again to continue.
    """
    from gym_client.cli.options import open_home
    from gym_client.cli.terminal import confirm
    from gym_client.variant_removal import pushed_to, remove_everywhere

    from gym_fed.config.serving import ServingConfig
    from gym_fed.config.yaml.file import load_config
    from gym_fed.personalization.writer import LocalRemoval, remove_variant
    from gym_fed.serving.store.records import is_account, validate_name
    from gym_fed.trust.identity.variant import HubRemoval, SignedRemoval

    validate_name(name)
    with open_store(store) as opened:
        folder, record = opened.folder, _record(opened, name)
    where = "on this machine and on every hub" if everywhere else "on this machine"
    if not yes and not confirm(
        f"All revisions of {name} will be deleted {where}. This cannot be undone. Continue?",
        f"removing {name} needs your consent",
    ):
        raise GymError(ErrorCode.INTERRUPTED, "nothing was removed")
    at = open_home(home, passphrase_file)
    signer = signing_key(key, home) if record is None else owners_key(key, folder, record, home)
    served = None if serving is None else load_config(serving, ServingConfig)
    now = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())
    path = receipt or folder / RECEIPTS / f"{name}-{now}-{secrets.token_hex(4)}.json"
    with _reserved(path):
        if everywhere:
            account = record.owner if record is not None and is_account(record.owner) else None
            hubs = list(remove_everywhere(at, name, account, insecure))
        else:
            hubs = [
                HubRemoval(address=pin.address, server=pin.server, status="not asked")
                for pin in pushed_to(at, name)
            ]
        traces = _forget_traces(served, name)  # first, so that the command can be repeated after a failure
        try:
            local = remove_variant(folder, name)
        except GymError as error:
            if error.code is not ErrorCode.NOT_FOUND or all(hub.status != "removed" for hub in hubs):
                raise
            local = LocalRemoval(None, ())  # only a hub had the variant
        removal = _removal(name, folder, record, local, hubs, traces)
        signed = SignedRemoval.sign(removal, signer)
        _write(path, signed)
    console.print_result(
        as_json, {**_facts(signed), "file": str(path)}, lambda: _print(removal, path, everywhere)
    )


@receipt_app.command()
def verify(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="Receipt written by `gym variant remove`.")],
    home: HomeFolder = None,
    as_json: AsJson = False,
) -> None:
    """Check a receipt: its signature, and its hubs' ledger entries, with the keys pinned in this home."""
    from gym_client.identity.home import Home
    from gym_client.variant_removal import check_hubs

    from gym_fed.trust.identity.variant import SignedRemoval

    signed = SignedRemoval.parse(_text(file))
    signed.verify()
    hubs = check_hubs(Home.open(home), signed)
    facts = {**_facts(signed), "hubs": hubs, "valid": True}
    whose = "a key that did not sign the variant"
    if signed.is_owners:
        whose = "its owner's key"
    elif signed.is_variants:
        whose = "according to the receipt, the key that signed the variant"
    removed_at = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(signed.removal.removed_at))
    lines = [
        f"valid: variant {signed.removal.variant} of {signed.removal.owner}, "
        f"{counted(len(signed.removal.revisions), 'revision')}, removed {removed_at}",
        f"signed by {signed.signed_by}, {whose}",
        *(_proven(hub) for hub in hubs),
    ]
    console.print_result(as_json, facts, "\n".join(lines))


def _record(store: VariantStore, name: str) -> VariantRecord | None:
    """Return the variant's row; None if it is missing or corrupt."""
    try:
        return store.get(name)
    except GymError as error:
        if error.code not in (ErrorCode.NOT_FOUND, ErrorCode.STATE_CORRUPT):
            raise
        return None


def _forget_traces(config: ServingConfig | None, name: str) -> dict[str, Any]:
    """Remove a variant from the usage log and the keys of a server; return the fields of the receipt."""
    from gym_fed.serving.http.keys import KeyFile
    from gym_fed.serving.http.usage_log import forget_variant
    from gym_fed.trust.identity.variant import NOT_COVERED, SERVERS_NOT_COVERED

    if config is None:
        return {"not_covered": [*NOT_COVERED, SERVERS_NOT_COVERED]}
    traces: dict[str, Any] = {"not_covered": list(NOT_COVERED)}
    if config.usage_log is not None and config.usage_log.exists():
        lines = forget_variant(config.usage_log, name)
        traces |= {"usage_log": str(config.usage_log), "usage_lines": lines}
    if config.api_keys is not None and config.api_keys.exists():
        removed, changed = KeyFile(config.api_keys).forget_variant(name)
        traces |= {"keys_removed": removed, "keys_changed": changed}
    return traces


def _removal(
    name: str,
    folder: Path,
    record: VariantRecord | None,
    local: LocalRemoval,
    hubs: list[HubRemoval],
    traces: dict[str, Any],
) -> VariantRemoval:
    from gym_fed.trust.identity.variant import RemovedRevision, VariantRemoval

    revisions = []
    for revision in () if local.removed is None else local.removed.revisions:
        try:
            signed = revision.signed()
        except GymError:  # an unreadable file has no valid signature
            signed = None
        revisions.append(
            RemovedRevision(
                revision=revision.revision,
                sha256=revision.sha256,
                size_bytes=revision.size_bytes,
                base_model=revision.base_model,
                base_digest=revision.base_digest,
                made_at=revision.updated_at,
                signed_by=None if signed is None else signed.signed_by,
                document=None if signed is None else signed.digest,
            )
        )
    return VariantRemoval(
        variant=name,
        owner="" if record is None else record.owner,
        store=str(folder),
        revisions=revisions,
        unlinked=[] if local.removed is None else list(local.removed.unlinked),
        shared=[] if local.removed is None else list(local.removed.shared),
        work=list(local.work),
        hubs=hubs,
        **traces,
    )


@contextmanager
def _reserved(path: Path) -> Iterator[None]:
    """Create the receipt's file before anything is removed, since removed files cannot be listed afterwards.

    Raises:
        GymError: ``FILE_EXISTS``.
        OSError: If the file cannot be created.
    """
    from gym_fed.core.files import make_folder

    try:
        make_folder(path.absolute().parent, 0o700)
        path.open("xb").close()
    except FileExistsError as error:
        there = error.filename or path
        raise GymError(
            ErrorCode.FILE_EXISTS, f"{there} already exists", "choose another --receipt"
        ) from error
    try:
        yield
    except BaseException:
        path.unlink(missing_ok=True)
        raise


def _write(path: Path, signed: SignedRemoval) -> None:
    """Write the receipt; if that fails, for example on a full disk, print it, because there is no other copy."""
    from gym_fed.core.files import write_atomically

    try:
        write_atomically(path, signed.to_json().encode(), mode=0o600)
    except (GymError, OSError):
        typer.echo(signed.to_json())
        raise


def _text(file: Path) -> str:
    """Read a receipt, up to the maximum size of a receipt.

    Raises:
        GymError: ``FILE_NOT_FOUND`` if the file cannot be read as text.
    """
    from gym_fed.trust.identity.variant import MAX_RECEIPT_BYTES

    try:
        with file.open("rb") as stream:
            return stream.read(MAX_RECEIPT_BYTES + 1).decode()
    except (OSError, UnicodeDecodeError) as error:
        raise GymError(ErrorCode.FILE_NOT_FOUND, f"{file} cannot be read as text") from error


def _facts(signed: SignedRemoval) -> dict[str, Any]:
    return {
        **signed.removal.model_dump(mode="json"),
        "name": signed.removal.variant,
        "signed_by": signed.signed_by,
        "is_owners": signed.is_owners,
        "is_variants": signed.is_variants,
    }


def _print(removal: VariantRemoval, path: Path, everywhere: bool) -> None:
    out = console.out
    revisions, files = counted(len(removal.revisions), "revision"), counted(len(removal.unlinked), "file")
    out.print(f"removed {removal.variant}: {revisions}, {files} deleted")
    if removal.shared:
        out.print(
            f"  kept, because other variants have the same files: {counted(len(removal.shared), 'file')}"
        )
    for folder in removal.work:
        out.print(f"  unfinished work deleted: {folder}")
    outcomes = {
        "removed": "no longer readable there; the hub deletes the file within two days",
        "absent": "it had no variant with this name",
        "another's": "not requested: your account there does not own it",
        "not asked": "this home has left that hub; a copy may remain"
        if everywhere
        else "a copy is kept there: gym variant hub remove NAME",
    }
    for hub in removal.hubs:
        out.print(f"  hub {hub.address}: {outcomes[hub.status].replace('NAME', removal.variant)}")
    if removal.usage_log:
        out.print(
            f"  {removal.usage_log}: {counted(removal.usage_lines, 'line')} no longer name it or its callers"
        )
    for what, names in (("removed", removal.keys_removed), ("changed", removal.keys_changed)):
        if names:
            out.print(f"  API keys {what}: {', '.join(names)}")
    out.print(f"  not covered: {'; '.join(removal.not_covered)}")
    out.print(f"receipt: {path}")


def _proven(hub: dict[str, Any]) -> str:
    where = f"hub {plain(hub['address'], 80)}"
    if hub["proven"]:
        return f"{where}: removed by entry {hub['ledger_sequence']} of its ledger"
    if "ledger_sequence" in hub:
        entry = f"entry {hub['ledger_sequence']} of its ledger"
        return f"{where}: {entry} removed a variant, but nothing in this home proves that it was this one"
    return f"{where}: {hub['status']}, not proven in this home"
