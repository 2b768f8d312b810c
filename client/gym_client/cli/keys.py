"""The commands `gym-client key` and `gym-client transfer`."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path
from typing import Annotated, Any

import typer

from gym_client.cli.options import HomeFolder, Insecure, PassphraseFile, Server, open_home
from gym_fed.core.console import AsJson, err, out, print_json, print_result
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.core.help import App
from gym_fed.core.text import counted

_LATEST = 2**40
"""The latest time that is shown, in Unix seconds: a hub may send any number."""

key_app = App(
    help="Show, encrypt, rotate, revoke, export and import the key of this home.", no_args_is_help=True
)


@key_app.command()
def show(home: HomeFolder = None, passphrase_file: PassphraseFile = None, as_json: AsJson = False) -> None:
    """Show the public key, whether the private key is encrypted, and the account on each hub."""
    from gym_client.identity.keystore import Keystore
    from gym_client.identity.pins import enrolled

    folder = open_home(home, passphrase_file)
    store = Keystore(folder.folder)
    newest = store.main().public_key.hex()
    summary: dict[str, Any] = {
        "path": str(store.main_path),
        "public_key": newest,
        "encrypted": store.is_encrypted,
        "rotation_interrupted": store.next_path.exists(),
        "servers": [
            {
                "address": pin.address,
                "server": pin.server,
                "contributor": pin.contributor,
                "public_key": pin.public_key or newest,
                "current": pin.public_key in ("", newest),
            }
            for pin in enrolled(folder)
        ],
    }
    lock = "encrypted" if summary["encrypted"] else "not encrypted; to encrypt it: gym-client key encrypt"
    lines = [f"{summary['public_key']} in {summary['path']}, {lock}"]
    for line in summary["servers"]:
        late = "" if line["current"] else ", with an older key; to replace it: gym-client key rotate"
        lines.append(f"{line['contributor']} at {line['address']}{late}")
    print_result(as_json, summary, *lines)


@key_app.command()
def encrypt(
    home: HomeFolder = None,
    passphrase_file: PassphraseFile = None,
    new_passphrase_file: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="A file whose first line is the new passphrase.",
            show_default="GYM_PASSPHRASE",
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Encrypt the home's keys with a passphrase, or change it."""
    from gym_client.identity.keystore import PASSPHRASE_VARIABLE, Keystore
    from gym_fed.trust.identity.keys import KEY_DERIVATION
    from gym_fed.trust.identity.passphrase import PassphraseSource

    folder = open_home(home, passphrase_file)
    store = Keystore(folder.folder)
    new = new_passphrase_file or (None if store.is_encrypted else passphrase_file)
    # GYM_PASSPHRASE is already used for the old passphrase.
    variable = f"{PASSPHRASE_VARIABLE}_NEW" if store.is_encrypted else PASSPHRASE_VARIABLE
    with folder.locked():
        files = store.encrypt(PassphraseSource(variable, new))
    print_result(
        as_json,
        {"path": str(store.main_path), "encrypted": True, "files": files, "by": KEY_DERIVATION},
        f"{store.main_path} is now encrypted with the passphrase ({KEY_DERIVATION})",
        note="Without the passphrase the key cannot be recovered: store the passphrase in a safe place.",
    )


@key_app.command()
def decrypt(home: HomeFolder = None, passphrase_file: PassphraseFile = None, as_json: AsJson = False) -> None:
    """Remove the passphrase."""
    from gym_client.identity.keystore import Keystore

    folder = open_home(home, passphrase_file)
    store = Keystore(folder.folder)
    with folder.locked():
        files = store.decrypt()
    print_result(
        as_json,
        {"path": str(store.main_path), "encrypted": False, "files": files},
        f"{store.main_path} is no longer encrypted",
    )


@key_app.command()
def export(
    file: Annotated[Path, typer.Argument(help="A new file for the private key.", show_default=False)],
    home: HomeFolder = None,
    passphrase_file: PassphraseFile = None,
    as_json: AsJson = False,
) -> None:
    """Export the newest private key to a file, encrypted with the home's passphrase or a new one."""
    from gym_client.identity.keystore import PASSPHRASE_VARIABLE, Keystore, passphrases
    from gym_fed.trust.identity.passphrase import PassphraseSource

    folder = open_home(home, passphrase_file)
    store = Keystore(folder.folder)
    key = store.main()
    if store.is_encrypted:
        secret = passphrases(folder.folder).get(str(store.main_path))
    else:
        secret = PassphraseSource(PASSPHRASE_VARIABLE, passphrase_file).create(str(file))
    key.save(file, secret)
    print_result(
        as_json,
        {"path": str(file), "public_key": key.public_key.hex()},
        f"{file} contains the private key, encrypted with its passphrase",
    )


@key_app.command("import")
def import_key(
    file: Annotated[Path, typer.Argument(help="A private key in PEM format.", show_default=False)],
    home: HomeFolder = None,
    passphrase_file: PassphraseFile = None,
    as_json: AsJson = False,
) -> None:
    """Import a private key into a home without a key. The key keeps its passphrase."""
    from gym_client.identity.keystore import Keystore, passphrases
    from gym_fed.core.files import write_atomically
    from gym_fed.trust.identity.keys import SigningKey

    folder = open_home(home, passphrase_file)
    path = Keystore(folder.folder).main_path
    with folder.locked():
        if path.exists():
            raise GymError(
                ErrorCode.FILE_EXISTS, f"{path} exists; a key is never overwritten", "use another --home"
            )
        key = SigningKey.load(file, passphrases(folder.folder).get)
        write_atomically(path, file.read_bytes(), mode=0o600)
    print_result(
        as_json,
        {"path": str(path), "public_key": key.public_key.hex()},
        f"imported the key {key.public_key.hex()} to {path}; join as before, and hubs will recognise you by this key",
    )


@key_app.command()
def rotate(
    home: HomeFolder = None,
    passphrase_file: PassphraseFile = None,
    another: Annotated[
        bool,
        typer.Option("--another", help="Create another key even if some hub has not accepted the last one."),
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Replace the key of your accounts on all hubs; their ids stay. The same command resumes a rotation."""
    from gym_client.hub.rotation import rotate as run

    folder = open_home(home, passphrase_file)
    with folder.locked():
        result = run(folder, another)
    print_result(as_json, result, f"the key is now {result['public_key']}")
    _report(
        result["servers"],
        "rotated",
        "run gym-client key rotate again later; until then, those hubs expect the old key",
        as_json,
    )


@key_app.command()
def revoke(
    home: HomeFolder = None,
    server: Server = None,
    contributor: Annotated[
        str | None,
        typer.Option(
            metavar="ID", help="Id of the account, if this home has none on the hub.", show_default=False
        ),
    ] = None,
    key_file: Annotated[
        Path | None,
        typer.Option(
            "--key",
            metavar="FILE",
            help="Sign with this recently replaced key.",
            show_default=False,
        ),
    ] = None,
    passphrase_file: PassphraseFile = None,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not prompt.")] = False,
    as_json: AsJson = False,
) -> None:
    """Revoke a lost or stolen key: it is no longer accepted, and its pending transfers are cancelled."""
    from gym_client.cli.terminal import confirm
    from gym_client.hub.rotation import revoke as run
    from gym_client.identity.address import Address
    from gym_client.identity.keystore import passphrases
    from gym_fed.trust.identity.keys import SigningKey

    folder = open_home(home, passphrase_file)
    if not yes and not confirm(
        "A revoked key cannot be used again; only the coordinator can bind another one. Continue?",
        "revoking needs your consent",
    ):
        raise GymError(ErrorCode.INTERRUPTED, "nothing was revoked")
    key = SigningKey.load(key_file, passphrases(folder.folder).get) if key_file else None
    results = run(folder, key, Address.parse(server) if server else None, contributor or "")
    if as_json:
        print_json({"servers": results})
    _report(
        results,
        "revoked",
        "run gym-client key revoke again, or ask the coordinator to run gym-server revoke",
        as_json,
    )


def transfer(
    to: Annotated[str, typer.Option(metavar="ID", help="Id of the receiving contributor.")],
    amount: Annotated[int, typer.Option(help="Number of credits.")],
    server: Server = None,
    home: HomeFolder = None,
    passphrase_file: PassphraseFile = None,
    insecure: Insecure = False,
    as_json: AsJson = False,
) -> None:
    """Transfer credits to another contributor; they arrive after the hub's hold period."""

    from gym_client.hub.known import enrolled_client
    from gym_client.hub.replies import parse_object
    from gym_fed.trust.identity.statements import TransferOrder
    from gym_fed.trust.wire.v1 import hub_pb2 as pb

    folder = open_home(home, passphrase_file)
    with enrolled_client(folder, server, insecure, may_have_left=True) as client:
        order = TransferOrder(
            sender=client.pin.contributor,
            to=to,
            amount=amount,
            server=client.pin.server,
            tls=client.pin.fingerprint,
            issued_at=int(client.now("Transfer")),
        )
        request = pb.TransferRequest(statement_json=order.to_json(), signature=client.sign(order.signed()))
        accepted = parse_object(
            client.call("Transfer", request).receipt_json,
            "a receipt",
            optional={"transfer": str, "from": str, "asked_at": int, "settles_at": int},
            amount=int,
            to=str,
            status=str,
        )
    if as_json:
        print_json(accepted)
        return
    at = accepted.get("settles_at")
    when = "now" if at is None else datetime.fromtimestamp(max(0, min(at, _LATEST))).astimezone()
    out.print(
        f"{counted(accepted['amount'], 'credit')} for {accepted['to']}: {accepted['status']}, settles {when}"
    )


def _report(servers: list[dict[str, Any]], done: str, remedy: str, as_json: bool) -> None:
    """Print the result for each hub. The exit code is that of the first hub that refused."""
    for line in servers:
        who = f"{line['contributor']} at {line['address']}"
        if not as_json:
            text = f"{who}: {done}" if line[done] else f"{who}: not {done}: {line['error']['message']}"
            out.print(text)
    failed = [GymError.from_dict(line["error"]) for line in servers if not line[done]]
    if failed:
        err.print(f"not completed on every hub; {remedy}")
        raise typer.Exit(failed[0].exit_code)
