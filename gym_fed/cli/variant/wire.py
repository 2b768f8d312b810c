"""`gym variant push`, `pull` and `hub`: variants between the store of this machine and a community's hub."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from gym_client.cli.options import HomeFolder, Insecure, PassphraseFile, Server

from gym_fed.cli.variant.options import NameArgument, StoreOption, open_store, shown_progress
from gym_fed.core import console
from gym_fed.core.console import AsJson
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.core.help import App
from gym_fed.core.text import counted
from gym_fed.serving.store.naming import variants_folder

if TYPE_CHECKING:
    from gym_client.hub.transport import HubClient
    from gym_client.variants import HubVariant

    from gym_fed.serving.store.records import VariantRecord
    from gym_fed.serving.store.store import VariantStore
    from gym_fed.trust.identity.variant import SignedVariant, VariantManifest


hub_app = App(help="List and remove your variants on a hub.", no_args_is_help=True)


def push(
    name: NameArgument,
    server: Server = None,
    readers: Annotated[
        str | None,
        typer.Option(
            metavar="IDS",
            help="Accounts that may read it, separated by commas.",
            show_default="unchanged; nobody for new variants",
        ),
    ] = None,
    public: Annotated[
        bool, typer.Option("--public", help="Allow every contributor of the hub to read it.")
    ] = False,
    private: Annotated[bool, typer.Option("--private", help="Make it private.")] = False,
    revision: Annotated[
        int | None,
        typer.Option(min=1, help="Sign it again with this revision number.", show_default="its own"),
    ] = None,
    store: StoreOption = None,
    home: HomeFolder = None,
    passphrase_file: PassphraseFile = None,
    insecure: Insecure = False,
    as_json: AsJson = False,
) -> None:
    """Push a variant of the store to a hub, signed by your account there. The same command resumes a push."""
    shown = _readers(readers, public, private)
    with open_store(store) as opened, _enrolled(server, home, passphrase_file, insecure) as client:
        from gym_client.variants import push_variant, to_push

        record, path = opened.get(name), opened.path(name)
        before = record.signed()
        manifest = _manifest(record, client.pin.contributor, revision)
        signed = to_push(client, manifest, before if revision is None else None)
        with shown_progress(as_json) as progress:
            receipt = push_variant(client, path, signed, shown, progress)
        if signed != before:  # the store is up to date
            _keep(opened, path, signed, record.owner)
    facts = {**receipt, "server": client.pin.server, "file": str(path)}
    console.print_result(
        as_json,
        facts,
        f"pushed {name}, revision {signed.manifest.revision}, to {client.address} as {signed.manifest.owner}",
    )


def pull(
    name: NameArgument,
    server: Server = None,
    user: Annotated[
        str | None,
        typer.Option(
            "--user",
            metavar="ID",
            help="Owner: an account, or the id given to create --user.",
            show_default="your own account",
        ),
    ] = None,
    store: StoreOption = None,
    home: HomeFolder = None,
    passphrase_file: PassphraseFile = None,
    insecure: Insecure = False,
    as_json: AsJson = False,
) -> None:
    """Pull a variant from a hub into the store, checked against its owner's signature and the hub's ledger."""
    incoming = variants_folder(store) / "incoming"
    with _enrolled(server, home, passphrase_file, insecure) as client:
        from gym_client.variants import pull_variant

        before, local = _local(store, name)
        owner, keeper = _owners(before, name, client.pin.contributor, user)
        with shown_progress(as_json) as progress:
            pulled = pull_variant(client, owner, name, incoming, progress, local=local)
    try:
        with open_store(store, create=True) as opened:
            record = _keep(opened, pulled.path, pulled.signed, keeper)
    finally:
        if pulled.path != local:
            pulled.path.unlink()
    shown = {**record.to_dict(), "ledger_sequence": pulled.ledger_sequence}
    console.print_result(
        as_json, shown, f"pulled {name}, revision {record.revision} of {record.owner}, from {client.address}"
    )


@hub_app.command("list")
def list_hub(
    server: Server = None,
    home: HomeFolder = None,
    passphrase_file: PassphraseFile = None,
    insecure: Insecure = False,
    as_json: AsJson = False,
) -> None:
    """List your variants on a hub, and others that you may read."""
    from gym_fed.core.console import TextTable

    with _enrolled(server, home, passphrase_file, insecure) as client:
        from gym_client.variants import list_variants

        variants = list(list_variants(client))
    table = TextTable("owner", "variant", "revision", "of", "bytes", "read by", "key", "note", box=None)
    for variant in variants:
        manifest = variant.signed.manifest
        row = (
            manifest.owner,
            manifest.variant,
            str(manifest.revision),
            variant.base,
            f"{manifest.size_bytes:,}",
        )
        who = _who_reads(variant, client.pin.contributor)
        table.add_row(*row, who, variant.key_status, manifest.note)
    console.print_result(as_json, [variant.to_dict() for variant in variants], table)


@hub_app.command("remove")
def remove_hub(
    name: NameArgument,
    server: Server = None,
    home: HomeFolder = None,
    passphrase_file: PassphraseFile = None,
    insecure: Insecure = False,
    as_json: AsJson = False,
) -> None:
    """Remove one of your variants from a hub; nobody can read it there afterwards. The local store keeps its copy."""
    with _enrolled(server, home, passphrase_file, insecure) as client:
        from gym_client.variants import remove_variant

        receipt = remove_variant(client, name)
    console.print_result(as_json, receipt, f"removed {name} from {client.address}")


def _manifest(record: VariantRecord, account: str, revision: int | None) -> VariantManifest:
    """Return the manifest to sign because the account's current key did not sign the store's copy."""
    from gym_fed.serving.store.records import is_account
    from gym_fed.trust.identity.variant import VariantManifest

    if is_account(record.owner) and record.owner != account:
        raise GymError(
            ErrorCode.PERMISSION_DENIED,
            f"variant {record.name!r} belongs to {record.owner}, but your account on this hub is {account}",
            "push your own variant",
        )
    return VariantManifest(
        variant=record.name,
        owner=account,
        base_model=record.base_model,
        base_digest=record.base_digest,
        delta_sha256=record.sha256,
        size_bytes=record.size_bytes,
        revision=revision or record.revision + int(record.is_signed),
        note=record.note,
    )


def _local(store: Path | None, name: str) -> tuple[VariantRecord | None, Path | None]:
    """Return the record of a variant in this machine's store, and its file."""
    try:
        with open_store(store) as opened:
            return opened.get(name), opened.path(name)
    except GymError as error:
        if error.code in (ErrorCode.FILE_NOT_FOUND, ErrorCode.NOT_FOUND):
            return None, None
        raise


def _owners(before: VariantRecord | None, name: str, own: str, user: str | None) -> tuple[str, str]:
    """Return the account that signed the variant and its owner in this store; refuse a conflict before the pull.

    The owner is the account, or, as with `create --user`, a user id: the id given for the caller's own variant, or the
    id whose variant of this name was signed by the same account.

    Args:
        before: The store's variant of this name, if any.
        own: The caller's account on the hub.
        user: The value of ``--user``.
    """
    from gym_fed.serving.store.records import is_account, validate_owner

    account = keeper = own
    if user is not None:
        validate_owner(user)
        keeper = user
        account = user if is_account(user) else own
    if before is not None and not is_account(before.owner) and keeper == account:
        signed = before.signed()
        if signed is not None and signed.manifest.owner == account:
            keeper = before.owner
    if before is not None and before.owner != keeper:
        raise GymError(
            ErrorCode.PERMISSION_DENIED,
            f"variant {name!r} belongs to {before.owner} in this store, but this one would belong to {keeper}",
            f"if that is you: --user {before.owner}; else remove it first, or pull into another --store"
            if account == own
            else "remove it first, or pull into another --store",
        )
    return account, keeper


def _keep(store: VariantStore, path: Path, signed: SignedVariant, owner: str) -> VariantRecord:
    """Add a variant to the store, replacing an older revision."""
    if signed.signed_by != owner:  # a later key of the account, as confirmed by hub and ledger
        store.trust(owner, signed.public_key)
    return store.add(path, signed, name=signed.manifest.variant, owner=owner, replace=True)


def _readers(listed: str | None, public: bool, private: bool) -> list[str] | None:
    if (listed is not None) + public + private > 1:
        raise GymError(
            ErrorCode.USAGE, "--readers, --public and --private are mutually exclusive", "pass only one"
        )
    if public:
        return ["*"]
    if private:
        return []
    if listed is None:
        return None
    names = [name.strip() for name in listed.split(",")]
    if not all(names) or "*" in names:
        raise GymError(
            ErrorCode.USAGE, f"--readers {listed!r} is not a list of ids", "for everyone: --public"
        )
    return names


def _who_reads(variant: HubVariant, account: str) -> str:
    if variant.is_public:
        return "everyone"
    if variant.signed.manifest.owner != account:
        return "you, and possibly others"
    return counted(variant.num_readers, "other") if variant.num_readers else "you alone"


def _enrolled(
    server: str | None, home: Path | None, passphrase_file: Path | None, insecure: bool
) -> HubClient:
    """Return a client of a joined hub, after checking that its ledger key is the pinned one."""
    from gym_client.cli.options import open_home
    from gym_client.hub.known import enrolled_client

    client = enrolled_client(open_home(home, passphrase_file), server, insecure)
    client.status()
    return client
