"""The `gym-server` command line. Commands import heavy packages lazily."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar

import typer

from gym_fed.core.console import (
    AsJson,
    AsJsonLines,
    VersionOption,
    err,
    fail,
    out,
    print_columns,
    print_event,
    print_json,
    print_result,
    print_table,
    run_app,
)
from gym_fed.core.help import App, CommandGroup, SetOption
from gym_fed.core.progress import spinner
from gym_fed.core.text import plain
from gym_server.cli.accounts import add_account_commands, variants_app
from gym_server.cli.audit import app as audit_app
from gym_server.cli.certificate import app as certificate_app
from gym_server.cli.dashboard import add_dashboard_commands
from gym_server.cli.evaluation import add_evaluation_commands
from gym_server.cli.health import health
from gym_server.cli.init import init
from gym_server.cli.ledger import app as ledger_app
from gym_server.cli.maintenance import add_maintenance_commands
from gym_server.cli.mirror import mirror
from gym_server.cli.options import DEFAULT_FOLDER, Folder, opened
from gym_server.cli.steering import add_steering_commands
from gym_server.cli.steering import app as recipe_app
from gym_server.store.unavailable import StoreUnavailable

if TYPE_CHECKING:
    from gym_server.evaluations.change import VersionChange


class _ServerCommands(CommandGroup):
    activities: ClassVar = {
        "Run": {
            "init": "create a hub: keys, database, commented config",
            "run": "serve the hub; rounds continue where they stopped",
            "invites": "create, list and cancel invites for contributors",
            "recipe": "show or change what contributors train",
        },
        "Watch": {
            "status": "round, version, privacy and work in progress",
            "rounds": "every round, and the verdict on every update",
            "rewards": "credits, reputation and the value of updates",
            "dashboard": "the hub in a browser",
            "health": "exit code 0 if the running hub answers",
            "privacy": "",
            "accounts": "",
            "variants": "",
            "groups": "",
        },
        "Result": {
            "model": "write a version as a model folder",
            "compare": "compare a version with version 0",
            "eval": "evaluate versions on suites of tasks",
            "rollback": "go back to a version",
        },
        "Keep": {
            "backup": "copy a hub, running or not, as one checked snapshot",
            "restore": "restore a hub from a backup",
            "check": "check that a hub is complete and undamaged",
            "ledger": "show, verify, export and replay the ledger",
            "audit": "",
            "mirror": "",
            "gc": "",
            "certificate": "",
            "dashboard-keys": "",
        },
        "Steer": {"pause": "", "resume": "", "skip": "", "revoke": "", "rebind": ""},
    }


app = App(
    cls=_ServerCommands,
    name="gym-server",
    help="Coordinate a community that improves one model: collect deltas, merge them robustly, keep the record.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
app.command()(init)
app.command()(health)
app.command()(mirror)
app.add_typer(ledger_app, name="ledger")
app.add_typer(audit_app, name="audit")
app.add_typer(variants_app, name="variants")
app.add_typer(recipe_app, name="recipe")
app.add_typer(certificate_app, name="certificate")


@app.callback()
def _options(version: VersionOption = False) -> None:
    """Coordinate a community that improves one model: collect deltas, merge them robustly, keep the record."""


@app.command()
def run(
    folder: Folder = DEFAULT_FOLDER,
    overrides: SetOption = None,
    exit_when_done: Annotated[
        bool, typer.Option("--exit-when-done", help="Exit when all rounds are committed.")
    ] = False,
    insecure: Annotated[
        bool, typer.Option("--insecure", help="Use plain text; for loopback addresses only.")
    ] = False,
    dashboard: Annotated[
        str | None,
        typer.Option(metavar="HOST:PORT", help="Serve the dashboard at this address.", show_default=False),
    ] = None,
    check: Annotated[
        bool, typer.Option("--check", help="Check everything that rounds need, then exit.")
    ] = False,
    events: Annotated[
        bool, typer.Option("--events", help="With --json: also print a line per join, update and verdict.")
    ] = False,
    as_json: AsJsonLines = False,
) -> None:
    """Serve the hub; rounds continue where they stopped. A terminal shows each contributor's progress and who is
    awaited."""
    if check:
        _check(folder, tuple(overrides or ()), as_json)
        return
    if not as_json:
        err.print(f"starting the hub in {plain(str(folder), 80)}")
    from contextlib import ExitStack

    from gym_fed.core.portable import limit_heaps

    limit_heaps()
    with spinner("loading torch and Flower"):
        from gym_fed.core.logs import log_to_stderr
        from gym_server.cli.evaluation import change_as_json
        from gym_server.cli.live import HubEvent, Watcher, line_console
        from gym_server.cli.run import LOG_LEVELS, run_hub
        from gym_server.cli.setup import join_commands, short_join_command
        from gym_server.cli.show import describe_round
        from gym_server.federation import Federation, read_config
        from gym_server.rounds.round_store import Round

    log_to_stderr(LOG_LEVELS, read_config(folder, tuple(overrides or ())).observe.log_format)
    served: list[Federation] = []
    footer: list[str] = []
    watching = ExitStack()

    def happened(event: HubEvent) -> None:
        if as_json:
            print_event({"event": event.kind, **event.fields})
        else:
            err.print(event.text)

    def listening(fed: Federation, port: int) -> None:
        served.append(fed)
        host = fed.config.listen.rpartition(":")[0]
        if as_json:
            print_event({"event": "listening", "host": host, "port": port, "fingerprint": fed.fingerprint})
        else:
            out.print(f"{fed.config.name} listens on {host}:{port}, TLS key {fed.fingerprint}")
            steps = join_commands(folder, fed.config, "" if insecure else fed.fingerprint, port)
            print_columns(steps)
            footer.append(short_join_command(steps))
        if events or not as_json:
            terminal = err if err.is_terminal and not as_json else None
            watching.enter_context(
                Watcher(fed.state, fed.config, fed.lease_histories, happened, terminal, footer)
            )

    def pages(url: str) -> None:
        if as_json:
            print_event({"event": "dashboard", "url": url})
        else:
            line_console().print(f"dashboard: {url}")
            footer.append(f"dashboard: {url.partition('/login')[0]}")

    def ended(current: Round) -> None:
        line = describe_round(served[0].database, served[0].round_store, current.server_round)
        if as_json:
            print_event({"event": "round", **line})
        else:
            line_console().print(line["text"])

    def changed(change: VersionChange) -> None:
        if as_json:
            print_event({"event": "change", **change_as_json(change)})
        else:
            for line in change.lines:
                line_console().print(line, markup=False)
            for warning in change.warnings:
                err.print(f"warning: {warning}", style="yellow", markup=False)

    ending = ""
    try:
        ending = run_hub(
            folder,
            tuple(overrides or ()),
            insecure=insecure,
            exit_when_done=exit_when_done,
            dashboard=dashboard,
            on_listening=listening,
            on_dashboard=pages,
            on_round=ended,
            on_change=changed,
        )
    finally:
        watching.close()
        if served:
            err.print(f"stopped: {ending}" if ending else "stopped; run the same command to continue")


def _check(folder: Path, overrides: tuple[str, ...], as_json: bool) -> None:
    with opened(folder, overrides) as fed, spinner("checking the data, the base model and the rules"):
        from gym_server.cli.checks_at_start import check_at_start

        notes = check_at_start(fed.state, fed.config, fed.recipes)
    if as_json:
        print_json({"ready": True, "notes": notes})
        return
    for note in notes:
        err.print(f"note: {note}")
    out.print("ready: all checks passed")


@app.command()
def status(folder: Folder = DEFAULT_FOLDER, as_json: AsJson = False) -> None:
    """Show the state of the federation: round, version, privacy, and every contributor."""
    with opened(folder) as fed:
        from gym_server.cli.show import status_of, status_table

        facts = status_of(fed.state, fed.config, fed.steering, fed.payouts, fed.fingerprint)
    print_result(as_json, facts, status_table(facts))


@app.command()
def rounds(folder: Folder = DEFAULT_FOLDER, as_json: AsJson = False) -> None:
    """List every round, and the verdict on every update."""
    with opened(folder) as fed:
        from gym_server.cli.show import rounds_of, rounds_tables

        listed = rounds_of(fed.database, fed.round_store)
    print_result(as_json, listed, *rounds_tables(listed))


@app.command()
def privacy(folder: Folder = DEFAULT_FOLDER, as_json: AsJson = False) -> None:
    """Show the hub's privacy guarantee, and the budget spent in total and per contributor."""
    with opened(folder) as fed:
        from gym_server.cli.show import privacy_lines
        from gym_server.privacy.budget import report

        facts = report(fed.config, fed.database)
    print_result(as_json, facts, *privacy_lines(facts))


@app.command()
def rewards(folder: Folder = DEFAULT_FOLDER, as_json: AsJson = False) -> None:
    """List credits, reputation, and the value of the last updates, by contributor."""
    with opened(folder) as fed:
        from gym_server.cli.show import rewards_shown, rewards_table

        facts = rewards_shown(fed.config, fed.database, fed.payouts)
    print_result(as_json, facts, lambda: print_table(rewards_table(facts, wide=not out.is_terminal)))


@app.command()
def model(
    output: Annotated[Path, typer.Argument(help="A new folder for the model.")],
    folder: Folder = DEFAULT_FOLDER,
    version: Annotated[int | None, typer.Option(help="Number of the version; the newest by default.")] = None,
    dtype: Annotated[
        str | None,
        typer.Option(
            metavar="DTYPE",
            help="Dtype: float32, bfloat16 or float16.",
            show_default="the base's if it keeps 99% of the change, else float32",
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Write a global version as a model folder in Hugging Face format."""
    with opened(folder) as fed, spinner(f"writing a version into {plain(str(output), 80)}"):
        from gym_fed.delta.kept import kept_text
        from gym_server.ledger.contributors import write_contributors
        from gym_server.rounds.hub_model import write_version

        written = write_version(fed.state, fed.config, output, version, dtype)
        written["contributors"] = write_contributors(fed.base, fed.database, output, written["height"])
    share = kept_text(written["kept"], written["dtype"]) or f"is in {written['dtype']}"
    what = f"version {written['height']} of {written['base_model']}"
    if written["height"] == 0:
        what += " (the base itself, without any contribution)"
    print_result(as_json, written, f"{what} is in {output}, and {share}; try: gym chat {output}")


add_account_commands(app)
add_steering_commands(app)
add_maintenance_commands(app)
add_evaluation_commands(app)
add_dashboard_commands(app)


def main() -> None:
    """Run the `gym-server` command line."""
    # With ERROR, the gRPC core logs a line for every client that names another host or fails its TLS handshake.
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    try:
        run_app(app)
    except StoreUnavailable as away:
        fail(away.refusal)


if __name__ == "__main__":
    main()
