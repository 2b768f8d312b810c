"""The `gym-client` command line. Heavy imports are inside the commands."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import typer

from gym_client.cli.audit import audit_app
from gym_client.cli.keys import key_app, transfer
from gym_client.cli.ledger import ledger_app, rewards
from gym_client.cli.options import HomeFolder, Insecure, PassphraseFile, Server, open_home
from gym_client.cli.service import install_links, install_service, pause, resume, uninstall
from gym_client.cli.ui import ui
from gym_fed.core.console import (
    AsJson,
    AsJsonLines,
    MemberName,
    VersionOption,
    err,
    out,
    print_event,
    print_result,
    report_error,
    run_app,
)
from gym_fed.core.errors import GymError
from gym_fed.core.help import DEVICE, App, ColumnsOption, CommandGroup
from gym_fed.core.registries import FORMATS
from gym_fed.core.text import counted

if TYPE_CHECKING:
    from gym_client.cli.join_options import JoinOptions
    from gym_client.display import Display


class _ClientCommands(CommandGroup):
    activities: ClassVar = {
        "Contribute": {
            "join": "train for a hub, round after round",
            "ui": "contribute from a page in your browser",
            "status": "your balance, and the verdicts on your updates",
            "rewards": "what you earned, round by round",
            "pause": "pause the agent of this home",
            "resume": "resume the agent",
            "leave": "withdraw from a hub; what you earned stays yours",
        },
        "Check": {
            "privacy": "the epsilon spent by each of your datasets",
            "ledger": "check that the hub's ledger is consistent",
            "audit": "check how updates were trained",
        },
        "Account": {
            "id": "your id, for a coordinator's allow-list",
            "key": "encrypt, rotate, revoke, export and import your key",
            "transfer": "send credits to another contributor",
            "install-service": "run join in the background",
            "install-links": "open invites with a click",
            "uninstall": "delete what gym-client wrote on this machine",
        },
    }


app = App(
    cls=_ClientCommands,
    name="gym-client",
    help="Improve a shared model with your own data: train here, send only a compressed, signed delta.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
app.add_typer(key_app, name="key")
app.command()(transfer)
app.add_typer(ledger_app, name="ledger")
app.add_typer(audit_app, name="audit")
app.command()(rewards)
app.command()(pause)
app.command()(resume)
app.command("install-service")(install_service)
app.command("install-links")(install_links)
app.command()(uninstall)
app.command()(ui)


@app.callback()
def _options(version: VersionOption = False) -> None:
    """Improve a shared model with your own data: train here, send only a compressed, signed delta."""


@app.command()
def join(
    server: Server = None,
    invite: Annotated[
        str | None,
        typer.Option(envvar="GYM_INVITE", metavar="INVITE", help="Invite, or its token.", show_default=False),
    ] = None,
    data: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="JSON, JSONL or text file. Default: the last one used, or an example.",
            show_default=False,
        ),
    ] = None,
    format: Annotated[
        str | None,
        typer.Option(
            click_type=MemberName(FORMATS, ("auto",)), help="Format of the rows.", show_default="auto"
        ),
    ] = None,
    columns: ColumnsOption = None,
    region: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR", help="Submit the merged rounds of the regional hub in DIR.", show_default=False
        ),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(
            "--base", metavar="MODEL", help="Folder of the base model, if you have it.", show_default=False
        ),
    ] = None,
    name: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Your name, shown to the coordinator.", show_default="your id"),
    ] = None,
    home: HomeFolder = None,
    device: Annotated[str, DEVICE] = "auto",
    rounds: Annotated[
        int | None, typer.Option(min=1, help="Exit after N rounds.", show_default=False)
    ] = None,
    yes: Annotated[
        bool,
        typer.Option(
            "--yes", "-y", help="Accept the terms, a new server's key, and the download of the base."
        ),
    ] = False,
    fingerprint: Annotated[
        str | None,
        typer.Option(
            metavar="FINGERPRINT", help="Fingerprint of the server's key, sha256:...", show_default=False
        ),
    ] = None,
    accept: Annotated[
        list[str] | None,
        typer.Option(
            "--accept", metavar="NAME", help="Accept only the terms that --json prints with this name."
        ),
    ] = None,
    accept_restore: Annotated[
        bool, typer.Option("--accept-restore", help="Continue with a hub restored from a backup.")
    ] = False,
    passphrase_file: PassphraseFile = None,
    insecure: Insecure = False,
    service: Annotated[
        bool,
        typer.Option(
            "--service",
            help="Exit with 0 after errors that a restart cannot fix, so that a service manager does not restart it.",
        ),
    ] = False,
    no_wait: Annotated[
        bool, typer.Option("--no-wait", help="Fail at once if the hub cannot be reached.")
    ] = False,
    as_json: AsJsonLines = False,
) -> None:
    """Train for a hub, round after round. The same command resumes after a stop."""
    from gym_client.display import make_display

    display = make_display(err, as_json)
    display.busy("starting")  # the following imports take seconds on a busy machine
    from gym_client.agent.policy import Policy
    from gym_client.cli.join import join as run_join
    from gym_client.cli.join_options import JoinOptions
    from gym_client.cli.terminal import TerminalConsent
    from gym_client.observe.observed import observed
    from gym_client.service_files import needs_a_person

    options = JoinOptions(
        server=server,
        invite=invite,
        data=data,
        data_format=format,
        columns=columns,
        region=region,
        model=model,
        name=name,
        device=device,
        rounds=rounds,
        fingerprint=fingerprint,
        insecure=insecure,
        wait=not no_wait,
    )
    try:
        folder = open_home(home, passphrase_file)
        with (
            folder.locked(),
            observed(Policy.load(folder.policy_path).observe, display) as shown,
        ):
            consent = TerminalConsent(yes, as_json, accept_restore, accept or ())
            options = replace(options, columns=_agreed(options, display, yes))
            result = run_join(folder, options, consent, shown)
    except GymError as error:
        display.close()
        if service and needs_a_person(error.code):
            report_error(error)
            return
        raise
    summary: dict[str, Any] = {
        "num_submitted": result.num_submitted,
        "finished": result.finished,
        "balance": result.balance,
    }
    if as_json:
        print_event({"event": "done", **summary})
        return
    balance = "unknown" if result.balance is None else f"{counted(result.balance, 'credit')}"
    sent = f"{counted(result.num_submitted, 'update')} sent; balance {balance}; receipts in {folder.receipts_path}"
    out.print(sent)


def _agreed(options: JoinOptions, display: Display, yes: bool) -> str | None:
    """Return the columns of a new file: those given, or a guess that the contributor confirms."""
    if options.data is None or str(options.data) == "example":
        return options.columns
    from gym_fed.data.column_guess import columns_text
    from gym_fed.data.column_question import agreed_columns
    from gym_fed.data.reading import parse_columns

    display.busy("")  # a question may follow
    columns = agreed_columns(
        options.data.expanduser(), options.data_format or "auto", parse_columns(options.columns), yes=yes
    )
    return columns_text(columns) or None


@app.command()
def status(
    server: Server = None,
    home: HomeFolder = None,
    passphrase_file: PassphraseFile = None,
    insecure: Insecure = False,
    as_json: AsJson = False,
) -> None:
    """Show your balance on a hub, and the verdicts on your updates."""
    from gym_client.cli.terminal import account_table, traffic_line
    from gym_client.hub.known import enrolled_client
    from gym_client.hub.replies import parse_verdicts
    from gym_client.hub.traffic import total_of
    from gym_client.seeding.store import SeedingTotals
    from gym_fed.trust.wire.v1 import hub_pb2 as pb

    folder = open_home(home, passphrase_file)
    with enrolled_client(folder, server, insecure, may_have_left=True) as client:
        hub = client.status()
        account = client.call("Account", pb.AccountRequest())
        moved = total_of(folder, client.pin.server)
    seeded = SeedingTotals(folder).now
    report = {
        "server": hub.name,
        "contributor": account.contributor,
        "name": account.name,
        "status": account.status,
        "balance": account.balance,
        "server_round": hub.server_round,
        "round_state": hub.round_state,
        "num_rounds": hub.num_rounds,
        "version_height": hub.version_height,
        "paused": hub.paused,
        "verdicts": parse_verdicts(account.verdicts_json),
        "join_download_bytes": hub.join_download_bytes,
        "round_download_bytes": hub.round_download_bytes,
        **moved.to_dict(),
        "seeding": asdict(seeded),
    }
    print_result(as_json, report, account_table(report), traffic_line(report))


@app.command()
def leave(
    server: Server = None,
    home: HomeFolder = None,
    passphrase_file: PassphraseFile = None,
    insecure: Insecure = False,
    as_json: AsJson = False,
) -> None:
    """Withdraw from a hub and receive no more tasks. Earned credits stay in its ledger."""
    from gym_client.agent.kept_soups import KeptSoups
    from gym_client.agent.residuals import Residuals
    from gym_client.audits.evidence import drop_all
    from gym_client.hub.known import enrolled_client
    from gym_client.identity.pins import left_in_words
    from gym_fed.trust.wire.v1 import hub_pb2 as pb

    own = open_home(home, passphrase_file)
    with enrolled_client(own, server, insecure) as client:
        contributor = client.pin.contributor
        client.call("Leave", pb.LeaveRequest())
        client.forget_enrolment()
        Residuals(own, client.pin.server).delete()
        KeptSoups(own).replace(client.pin.server, ())
        drop_all(own, client.pin.server)
    print_result(as_json, {"left": contributor, "server": client.pin.server}, left_in_words(client.pin))


@app.command()
def privacy(home: HomeFolder = None, as_json: AsJson = False) -> None:
    """Show the epsilon spent by each dataset, per hub and in total."""
    from gym_client.cli.terminal import privacy_table
    from gym_client.identity.home import Home
    from gym_client.privacy.book import PrivacyBook

    rows = PrivacyBook(Home.open(home)).summary()
    print_result(
        as_json, rows, privacy_table(rows) if rows else "no update from this home was trained with privacy"
    )


@app.command("id")
def show_id(home: HomeFolder = None, passphrase_file: PassphraseFile = None, as_json: AsJson = False) -> None:
    """Show your id, which a coordinator's allow-list needs. Creates the key on first use."""
    key = open_home(home, passphrase_file).key
    print_result(
        as_json, {"contributor": key.contributor, "public_key": key.public_key.hex()}, key.contributor
    )


def main() -> None:
    """Run the command line."""
    run_app(app)


if __name__ == "__main__":
    main()
