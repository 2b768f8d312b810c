"""The commands `gym-client rewards` and `gym-client ledger`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gym_client.cli.options import HomeFolder, Insecure, PassphraseFile, Server, open_home
from gym_fed.core.console import AsJson, err, out, print_json, print_result, print_table
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.core.help import App, ExportedLedger
from gym_fed.core.text import counted

if TYPE_CHECKING:
    from gym_client.identity.home import Home
    from gym_client.identity.pins import ServerPin


ledger_app = App(
    help="Show the hub's signed heads, and check that they are consistent.",
    no_args_is_help=True,
)


def rewards(
    server: Server = None,
    verify: Annotated[
        bool, typer.Option("--verify", help="Download the ledger and check everything against it.")
    ] = False,
    ledger: ExportedLedger = None,
    home: HomeFolder = None,
    passphrase_file: PassphraseFile = None,
    insecure: Insecure = False,
    as_json: AsJson = False,
) -> None:
    """Show what you earned, round by round; --verify compares it with the hub's signed ledger, or an exported one."""
    from gym_client.ledger.rewards import Tally, rewards_table, verify_copy

    folder = open_home(home, passphrase_file)
    if ledger is not None:
        if not verify:
            raise GymError(ErrorCode.USAGE, "--ledger requires --verify", "add --verify")
        pin = _pin(folder, server)
        checked = verify_copy(folder, ledger, bytes.fromhex(pin.ledger_key), Tally(pin.contributor))
        print_result(as_json, {"contributor": pin.contributor, "verified": checked.to_dict()}, checked.text())
        return
    report = _ask(folder, server, insecure, verify, as_json)
    if as_json:
        print_json(report)
        return
    print_table(rewards_table(report))
    if verify:
        out.print(report["verified_text"])
    else:
        err.print(f"receipts in {folder.receipts_path}; gym-client rewards --verify checks them all")


def _ask(folder: Home, server: str | None, insecure: bool, verify: bool, as_json: bool) -> dict[str, Any]:
    from gym_client.display import Display, make_display
    from gym_client.hub.known import enrolled_client
    from gym_client.hub.replies import parse_account, parse_verdicts
    from gym_client.ledger.receipts import Receipts
    from gym_client.ledger.rewards import proved_rounds, verify_online
    from gym_fed.trust.wire.v1 import hub_pb2 as pb

    display = Display() if as_json else make_display(err, False)
    with enrolled_client(folder, server, insecure, may_have_left=True) as client:
        status = client.status()
        try:
            checked = None
            if verify:
                checked = verify_online(
                    folder, client, lambda done, total: display.progress("ledger", done, total, None)
                )
            account = client.call("Account", pb.AccountRequest())
            verdicts = parse_verdicts(account.verdicts_json)
            Receipts(folder, client).fetch(verdicts)
        finally:
            display.close()
        worth = parse_account(account.rewards_json)
        proved = proved_rounds(folder, client.pin.server)
    rounds = [
        {**line, "receipts": proved.get(line["server_round"], [])} for line in worth.pop("rounds", verdicts)
    ]
    report = {
        **worth,
        "server": status.name,
        "contributor": account.contributor,
        "balance": account.balance,
        "rounds": rounds,
        "num_receipts": sum(map(len, proved.values())),
    }
    if checked is not None:
        report["verified"] = checked.to_dict()
        if not as_json:
            report["verified_text"] = checked.text()
    return report


@ledger_app.command()
def head(
    server: Server = None,
    home: HomeFolder = None,
    passphrase_file: PassphraseFile = None,
    as_json: AsJson = False,
) -> None:
    """Print the newest signed head seen by this home, for others to compare with theirs."""
    from gym_client.hub.heads import Heads

    folder = open_home(home, passphrase_file)
    pin = _pin(folder, server)
    newest = Heads(folder, bytes.fromhex(pin.ledger_key)).newest()
    if newest is None:
        raise GymError(
            ErrorCode.NOT_FOUND,
            f"no head of {pin.server} has been seen yet",
            f"gym-client rewards --server {pin.address}",
        )
    tip = newest.head
    print_result(
        as_json,
        newest.to_dict(),
        f"{tip.server}: {counted(tip.size, 'entry')}, hash {tip.hash}, root {tip.root}",
    )


@ledger_app.command()
def compare(
    file: Annotated[Path, typer.Argument(metavar="HEAD.json", help="A signed head, or a proof of a fork.")],
    server: Server = None,
    home: HomeFolder = None,
    passphrase_file: PassphraseFile = None,
    insecure: Insecure = False,
    as_json: AsJson = False,
) -> None:
    """Compare another contributor's head with those seen by this home. If they conflict, store the proof of a fork."""
    from gym_client.hub.heads import Heads
    from gym_client.hub.known import enrolled_client
    from gym_fed.trust.ledger.heads import EntryProof, SignedHead

    folder = open_home(home, passphrase_file)
    pin = _pin(folder, server)
    try:
        document = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise GymError(ErrorCode.FILE_NOT_FOUND, f"no head at {file}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise GymError(ErrorCode.DATA_INVALID, f"{file} is not JSON: {error}") from error
    key = bytes.fromhex(pin.ledger_key)
    if isinstance(document, dict) and "heads" in document:
        kept_at, reason = Heads(folder, key).keep_proof(document)
        raise GymError(
            ErrorCode.LEDGER_FORKED,
            f"{file} proves that {pin.server} signed {reason}; the proof is now in {kept_at}",
            "show the proof to the other contributors and to the coordinator; while it exists, this home does not work "
            "for the hub",
        )
    theirs = SignedHead.from_dict(document)

    def prove(sequence: int, size: int) -> EntryProof:
        with enrolled_client(folder, server, insecure, may_have_left=True) as client:
            return client.prove(sequence, size)

    def statements() -> list[str]:
        with enrolled_client(folder, server, insecure, may_have_left=True) as client:
            return client.statements()

    heads = Heads(folder, key)
    before = len(heads.kept())
    heads.see(theirs, prove, statements=statements)
    print_result(
        as_json,
        {"same": True, "server": pin.server, "size": theirs.size, "heads": before},
        f"same ledger: their head of {counted(theirs.size, 'entry')} agrees with {counted(before, 'head')} seen before",
    )


@ledger_app.command()
def restored(
    accept: Annotated[
        bool, typer.Option("--accept", help="Continue with the hub; the lost records are void.")
    ] = False,
    server: Server = None,
    home: HomeFolder = None,
    passphrase_file: PassphraseFile = None,
    insecure: Insecure = False,
    as_json: AsJson = False,
) -> None:
    """Show whether the hub was restored from a backup, and what you lost."""
    from gym_client.hub.known import enrolled_client
    from gym_client.ledger.restored import accept_restore, loss_of
    from gym_fed.trust.ledger.restored import HubRestored

    folder = open_home(home, passphrase_file)
    accepted = []
    with folder.locked(), enrolled_client(folder, server, insecure, may_have_left=True) as client:
        while True:
            try:
                client.status()
                break
            except HubRestored as error:
                loss = loss_of(folder, error.signed)
                if not as_json:
                    for line in loss.lines():
                        err.print(line)
                if not accept:
                    raise
                accept_restore(folder, bytes.fromhex(client.pin.ledger_key), error.signed)
                accepted.append(loss.to_dict())
    print_result(
        as_json,
        {"accepted": accepted},
        f"accepted: {len(accepted)}"
        if accepted
        else "nothing to accept: the hub's ledger has all its signed entries",
    )


def _pin(folder: Home, server: str | None) -> ServerPin:
    """Load the pin of a known hub, without a connection."""
    from gym_client.hub.known import address_of
    from gym_client.identity.pins import ServerPin

    address = address_of(folder, server)
    pin = ServerPin.load(folder, address)
    if pin is None or not pin.ledger_key:
        raise GymError(
            ErrorCode.UNAUTHENTICATED,
            f"{folder.folder} has never connected to {address}",
            f"gym-client join --server {address}",
        )
    return pin
