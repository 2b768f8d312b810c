"""`gym-server accounts`, `revoke` and `rebind`: contributors and their keys."""

from __future__ import annotations

import datetime
from pathlib import Path
from typing import Annotated, Any

import typer

from gym_fed.console import out, print_json, print_table
from gym_fed.errors import ErrorCode, GymError

Folder = Annotated[Path, typer.Option("--dir", help="The hub's folder.", envvar="GYM_SERVER_DIR")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Contributor = Annotated[str, typer.Argument(help="Id of the account.", show_default=False)]
_HUB = Path("hub")


def add_key_commands(app: typer.Typer) -> None:
    """Register the commands of this module."""
    for command in (accounts, revoke, rebind):
        app.command()(command)


def accounts(folder: Folder = _HUB, as_json: AsJson = False) -> None:
    """Every account, its balance, and the keys that it has had."""
    from gym_server.federation import Federation

    with Federation.open(folder) as fed:
        found = accounts_of(fed)
    if as_json:
        print_json(found)
        return
    from rich.table import Column, Table

    ids = [Column(name, no_wrap=True, min_width=width) for name, width in (("contributor", 17), ("key", 16))]
    table = Table(ids[0], "name", "status", "credits", ids[1], "from", "until", "key is")
    for account in found:
        name = account["name"] if account["name"] != account["contributor"] else ""
        first = (account["contributor"], name, account["status"], str(account["balance"]))
        for key in account["keys"]:
            times = [_day(key["from"]), _day(key["until"])]
            table.add_row(*first, key["public_key"][:16], *times, key["status"])
            first = ("", "", "", "")
    print_table(table)


def revoke(
    contributor: Contributor,
    reason: Annotated[str, typer.Option(help="Why; it is written to the ledger.")],
    folder: Folder = _HUB,
    as_json: AsJson = False,
) -> None:
    """End an account's key at once: sessions, tasks, uploads, pending transfers. The hub may be running."""
    from gym_server.federation import Federation

    with Federation.open(folder) as fed:
        found = fed.keys.revoke_as_coordinator(contributor, reason)
    if as_json:
        print_json(found)
        return
    out.print(
        f"the key of {contributor} is revoked, {found['cancelled_transfers']} transfers are cancelled; "
        f"another one: gym-server rebind {contributor} --public-key HEX",
        markup=False,
    )


def rebind(
    contributor: Contributor,
    public_key: Annotated[
        str, typer.Option(help="The new key: `gym-client id --json` in a new home shows it.")
    ],
    folder: Folder = _HUB,
    as_json: AsJson = False,
) -> None:
    """Give an account whose key was revoked another one. Be sure who asks."""
    from gym_server.federation import Federation

    try:
        key = bytes.fromhex(public_key)
    except ValueError as error:
        raise GymError(ErrorCode.USAGE, f"--public-key {public_key[:80]!r} is not hex") from error
    with Federation.open(folder) as fed:
        found = fed.keys.rebind(contributor, key)
    if as_json:
        print_json(found)
        return
    out.print(f"{contributor} has the key {public_key} now", markup=False)


def accounts_of(fed: Any) -> list[dict[str, Any]]:
    """What ``gym-server accounts`` tells, the oldest account first."""
    from sqlalchemy import select

    from gym_server.store.tables import accounts as table

    keys = fed.keys.history()
    fed.payouts.settle_due()
    with fed.database.reading() as tx:
        return [
            {
                "contributor": row.contributor,
                "name": row.name,
                "status": row.status,
                "enrolled_at": row.enrolled_at,
                "keys": keys.get(row.contributor, []),
                **fed.payouts.purse(tx, row.contributor),
            }
            for row in tx.execute(select(table).order_by(table.c.enrolled_at))
        ]


def _day(seconds: float | None) -> str:
    return "" if seconds is None else datetime.datetime.fromtimestamp(seconds).strftime("%Y-%m-%d")
