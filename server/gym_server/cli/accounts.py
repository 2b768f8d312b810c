"""The commands that manage accounts: `gym-server accounts`, `revoke`, `rebind`, `invites` and `variants`."""

from __future__ import annotations

import datetime
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gym_fed.core.console import (
    PIPE_COLUMNS,
    AsJson,
    out,
    print_columns,
    print_json,
    print_result,
    print_table,
)
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.core.help import App
from gym_fed.core.text import counted, plain
from gym_server.cli.options import DEFAULT_FOLDER, Folder, opened

if TYPE_CHECKING:
    from gym_fed.core.console import TextTable


variants_app = App(
    help="List contributors' variants on the hub, remove them, and allow them again.", no_args_is_help=True
)


@variants_app.command("list")
def list_variants(folder: Folder = DEFAULT_FOLDER, as_json: AsJson = False) -> None:
    """List every variant: owner, revision, model, size, and who may read it."""
    with opened(folder) as fed:
        variants = variants_of(fed)
    print_result(as_json, variants, lambda: print_table(variants_table(variants)))


def variants_table(variants: list[dict[str, Any]]) -> TextTable:
    """Return the variants of ``variants_of`` as a table."""
    from gym_fed.core.console import TextTable

    table = TextTable("owner", "variant", "revision", "of", "bytes", "read by", "key", box=None)
    for variant in variants:
        public, others = "*" in variant["readers"], len(variant["readers"])
        who = "everyone" if public else f"{counted(others, 'other')}" if others else "its owner"
        row = (variant["owner"], variant["variant"], str(variant["revision"]), variant["base"])
        size = f"{variant['size_bytes']:,}"
        table.add_row(*row, size, who, variant["key_status"])
    return table


@variants_app.command()
def remove(
    owner: Annotated[str, typer.Argument(help="Id of the account.", show_default=False)],
    name: Annotated[str, typer.Argument(metavar="NAME", help="Name of the variant.", show_default=False)],
    reason: Annotated[str, typer.Option(help="Reason, written to the ledger.")],
    folder: Folder = DEFAULT_FOLDER,
    as_json: AsJson = False,
) -> None:
    """Remove a variant; it cannot be read or pushed again. The hub may be running."""
    with opened(folder) as fed:
        receipt = fed.variants.remove(owner, name, "coordinator", reason)
    print_result(
        as_json, receipt, plain(f"variant {name} of {owner} is removed; the reason is in the ledger")
    )


@variants_app.command()
def allow(
    owner: Annotated[str, typer.Argument(help="Id of the account.", show_default=False)],
    name: Annotated[str, typer.Argument(metavar="NAME", help="Name of the variant.", show_default=False)],
    folder: Folder = DEFAULT_FOLDER,
    as_json: AsJson = False,
) -> None:
    """Allow an owner to push a removed variant again."""
    with opened(folder) as fed:
        fed.variants.allow(owner, name)
    print_result(
        as_json,
        {"owner": owner, "variant": name, "allowed": True},
        plain(f"{owner} may push variant {name} again"),
    )


def variants_of(fed: Any) -> list[dict[str, Any]]:
    """Return the variants, sorted by owner and name."""
    rows: list[dict[str, Any]] = []
    page = ""
    while True:
        variants, page = fed.variants.page(None, page)
        rows += [
            {
                **variant.signed.manifest.model_dump(mode="json"),
                "base": variant.base,
                "key_status": variant.key_status,
                "ledger_sequence": variant.ledger_sequence,
                "put_at": variant.put_at,
                "readers": list(variant.readers),
            }
            for variant in variants
        ]
        if not page:
            return rows


invites_app = App(help="Create, list and cancel invites for new contributors.", no_args_is_help=True)

Contributor = Annotated[
    str, typer.Argument(help="Id of the account, or its first characters.", show_default=False)
]
_MOST = 1000
_DAY_SECONDS = 86_400
_SEND_WHEEL = "no package index has this gym-fed: send its wheel along (make wheel), or set dashboard.install"


def add_account_commands(app: typer.Typer) -> None:
    """Register the commands of this module."""
    for command in (accounts, revoke, rebind):
        app.command()(command)
    app.add_typer(invites_app, name="invites")


def accounts(
    folder: Folder = DEFAULT_FOLDER,
    wide: Annotated[
        bool, typer.Option("--wide", help="Print full ids, keys and times, as in a pipe.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """List every account, its balance, and all its keys. Ids are shortened."""
    with opened(folder) as fed:
        rows = accounts_of(fed)
    if as_json:
        print_json(rows)
        return
    wide = wide or not out.is_terminal
    print_table(accounts_table(rows, wide), width=PIPE_COLUMNS if wide else None)


def revoke(
    contributor: Contributor,
    reason: Annotated[str, typer.Option(help="Reason, written to the ledger.")],
    folder: Folder = DEFAULT_FOLDER,
    as_json: AsJson = False,
) -> None:
    """Revoke an account's key at once: sessions, tasks, uploads and pending transfers end. The hub may be running."""
    with opened(folder) as fed:
        contributor = _whole_id(fed, contributor)
        revocation = fed.keys.revoke_as_coordinator(contributor, reason)
    print_result(
        as_json,
        revocation,
        f"the key of {contributor} is revoked, {counted(revocation['cancelled_transfers'], 'transfer', 'are')} "
        "cancelled; "
        f"to set a new key: gym-server rebind {contributor} --public-key HEX",
    )


def rebind(
    contributor: Contributor,
    public_key: Annotated[
        str, typer.Option(metavar="KEY", help="The new public key, as `gym-client id --json` prints it.")
    ],
    folder: Folder = DEFAULT_FOLDER,
    as_json: AsJson = False,
) -> None:
    """Replace the revoked key of an account. Verify who requests it."""
    try:
        key = bytes.fromhex(public_key)
    except ValueError as error:
        raise GymError(ErrorCode.USAGE, f"--public-key {public_key[:80]!r} is not hex") from error
    with opened(folder) as fed:
        contributor = _whole_id(fed, contributor)
        rebinding = fed.keys.rebind(contributor, key)
    print_result(as_json, rebinding, f"{contributor} now has the key {public_key}")


def accounts_table(rows: list[dict[str, Any]], wide: bool = False) -> TextTable:
    """Return the rows of ``accounts_of`` as a table; 80 columns unless ``wide``."""
    from rich.table import Column

    from gym_fed.core.console import TextTable, short_ids

    shown = {row["contributor"]: row["contributor"] for row in rows} if wide else {}
    shown = shown or short_ids(row["contributor"] for row in rows)
    digits = 64 if wide else 8
    name = Column("name", no_wrap=True, overflow="ellipsis", max_width=None if wide else 16)
    ids = [Column(title, no_wrap=True) for title in ("contributor", "key", "key is")]
    more = ("from", "until") if wide else ()
    table = TextTable(ids[0], name, "status", Column("credits", justify="right"), *ids[1:], *more, box=None)
    for account in rows:
        who, named = account["contributor"], account["name"]
        first = (shown[who], "" if named == who else named, account["status"], str(account["balance"]))
        for key in account["keys"]:
            times = (_time(key["from"]), _time(key["until"]))
            key_is = (key["status"], *times) if wide else (f"{key['status']} {times[1] or times[0]}",)
            table.add_row(*first, key["public_key"][:digits], *key_is)
            first = ("", "", "", "")
    return table


def _whole_id(fed: Any, beginning: str) -> str:
    """Return the id of the account whose id starts with ``beginning``.

    Raises:
        GymError: ``NOT_FOUND`` if no id matches, ``USAGE`` if several do.
    """
    from sqlalchemy import select

    from gym_server.store.tables import accounts as table

    with fed.database.reading() as tx:
        matches = [
            account for account in tx.scalars(select(table.c.contributor)) if account.startswith(beginning)
        ]
    if beginning in matches or len(matches) == 1:
        return beginning if beginning in matches else str(matches[0])
    code = ErrorCode.USAGE if matches else ErrorCode.NOT_FOUND
    what = f"{len(matches)} accounts begin with" if matches else "no account begins with"
    raise GymError(code, f"{what} {plain(beginning, 80)!r}", "gym-server accounts lists them")


def accounts_of(fed: Any) -> list[dict[str, Any]]:
    """Return the accounts, oldest first."""
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
                **fed.payouts.balance_of(tx, row.contributor),
            }
            for row in tx.execute(select(table).order_by(table.c.enrolled_at))
        ]


@invites_app.command("create")
def create_invites(
    folder: Folder = DEFAULT_FOLDER,
    count: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=_MOST,
            help="Number of invites with the same note; each admits one contributor.",
            show_default="1",
        ),
    ] = None,
    note: Annotated[
        list[str] | None,
        typer.Option(help="Note about the recipient, kept on the hub. Repeat the option for more invites."),
    ] = None,
    expires_days: Annotated[
        float, typer.Option(min=0.001, max=365, help="Days until the invites expire.")
    ] = 7.0,
    as_json: AsJson = False,
) -> None:
    """Create invites and print each on a line: id, note, link. Every invite works once."""
    notes = note or [""]
    if count is not None and len(notes) > 1:
        raise GymError(
            ErrorCode.USAGE,
            f"--count {count} was passed with {counted(len(notes), 'note')}",
            "pass --count with one --note, or one --note for each invite",
        )
    notes = notes * (count or 1)
    with opened(folder) as fed:
        from gym_server.accounts.invitations import (
            address_for_others,
            invite_message,
            make_invites,
            needs_wheel,
        )

        seconds = expires_days * _DAY_SECONDS
        invites = make_invites(fed.config, fed.folder, fed.accounts, fed.fingerprint, notes, seconds)
        where = address_for_others(fed.config, fed.folder)
        link = invites[0]["invite"] if len(invites) == 1 else "LINK"
        message = invite_message(fed.config, link, seconds)
        remarks = [_SEND_WHEEL] if needs_wheel(fed.config) else []
    if where.is_loopback:
        remarks.append(f"only this machine can connect to {where.host}; set advertise to admit others")
    print_result(
        as_json,
        {"invite": invites[0]["invite"], "invites": invites, "expires_days": expires_days},
        lambda: print_columns([(one["id"], one["note"], one["invite"]) for one in invites]),
        note="\n\n".join([f"\na message to send along:\n\n{message}", *remarks]),
    )


@invites_app.command("list")
def list_invites(folder: Folder = DEFAULT_FOLDER, as_json: AsJson = False) -> None:
    """List every invite, the newest first: open, used (by whom), expired or cancelled."""
    from gym_fed.core.console import TextTable

    with opened(folder) as fed:
        from gym_server.accounts.invitations import invites_of

        invites = invites_of(fed.database, fed.clock)
    if as_json:
        print_json(invites)
        return
    table = TextTable("invite", "state", "until", "used by", "note", box=None)
    for invite in invites:
        until, by = (
            _time(invite["expires_at"], "%Y-%m-%d %H:%M"),
            (invite["used_by"] or "")[: 9 if out.is_terminal else None],
        )
        table.add_row(invite["id"], invite["state"], until, by, invite["note"])
    print_table(table)


@invites_app.command()
def cancel(
    ids: Annotated[
        list[str],
        typer.Argument(metavar="ID...", help="Ids of invites, as `list` shows them.", show_default=False),
    ],
    folder: Folder = DEFAULT_FOLDER,
    as_json: AsJson = False,
) -> None:
    """Cancel unused invites. The hub may be running."""
    with opened(folder) as fed:
        from gym_server.accounts.invitations import cancel_invites

        cancelled = cancel_invites(fed.database, fed.clock, ids)
    print_result(as_json, {"cancelled": cancelled}, f"cancelled: {', '.join(cancelled)}")


def _time(seconds: float | None, form: str = "%Y-%m-%d") -> str:
    return "" if seconds is None else datetime.datetime.fromtimestamp(seconds).strftime(form)
