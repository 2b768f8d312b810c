"""`gym-server invite` and `gym-server invites`: letting contributors in, one by one."""

from __future__ import annotations

import datetime
from pathlib import Path
from typing import Annotated

import typer

from gym_fed.console import AsJson, print_json, print_result, print_table

invites_app = typer.Typer(help="The invites that were made: list, cancel.", no_args_is_help=True)

Folder = Annotated[Path, typer.Option("--dir", help="The hub's folder.", envvar="GYM_SERVER_DIR")]
_HUB = Path("hub")
_MOST = 1000


def invite(
    folder: Folder = _HUB,
    count: Annotated[int, typer.Option(min=1, max=_MOST, help="How many; each lets one contributor in.")] = 1,
    note: Annotated[str, typer.Option(help="For whom; kept on the hub only.")] = "",
    valid_hours: Annotated[float, typer.Option(min=0.01, max=8760, help="How long it can be used.")] = 168.0,
    as_json: AsJson = False,
) -> None:
    """Make invites, a line each; every one works once."""
    from gym_server.federation import Federation
    from gym_server.invitations import make_invites

    with Federation.open(folder) as fed:
        made = make_invites(fed, count, note, valid_hours * 3600)
    print_result(
        as_json,
        {"invite": made[0]["invite"], "invites": made, "valid_hours": valid_hours},
        *(one["invite"] for one in made),
        note=f"use each once, within {valid_hours:g} h: gym-client join --invite {made[0]['invite'][:24]}...",
    )


@invites_app.command("list")
def list_invites(folder: Folder = _HUB, as_json: AsJson = False) -> None:
    """Every invite, the newest first: open, used (by whom), expired or cancelled."""
    from gym_fed.tables import TextTable
    from gym_server.federation import Federation
    from gym_server.invitations import invites_of

    with Federation.open(folder) as fed:
        found = invites_of(fed)
    if as_json:
        print_json(found)
        return
    table = TextTable("invite", "state", "until", "used by", "note", box=None)
    for one in found:
        until, by = _time(one["expires_at"]), (one["used_by"] or "")[:9]
        table.add_row(one["id"], one["state"], until, by, one["note"])
    print_table(table)


@invites_app.command()
def cancel(
    ids: Annotated[
        list[str], typer.Argument(metavar="ID...", help="As `list` shows them.", show_default=False)
    ],
    folder: Folder = _HUB,
    as_json: AsJson = False,
) -> None:
    """Take back invites that nobody has used yet. The hub may be running."""
    from gym_server.federation import Federation
    from gym_server.invitations import cancel_invites

    with Federation.open(folder) as fed:
        cancelled = cancel_invites(fed, ids)
    print_result(as_json, {"cancelled": cancelled}, f"cancelled: {', '.join(cancelled)}")


def _time(seconds: float | None) -> str:
    return "" if seconds is None else datetime.datetime.fromtimestamp(seconds).strftime("%Y-%m-%d %H:%M")
