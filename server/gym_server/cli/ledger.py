"""The `gym-server ledger` commands: show, head, verify, export, replay, rescore and attribute."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gym_fed.core.console import AsJson, err, out, print_json, print_result
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.core.help import App, ExportedLedger
from gym_fed.core.progress import spinner
from gym_fed.core.text import counted, counts_in_words
from gym_fed.trust.ledger.entries import Entry
from gym_server.cli.options import DEFAULT_FOLDER, Folder, opened

if TYPE_CHECKING:
    from gym_fed.trust.regions.links import RegionLinks

app = App(help="Show, verify, export and replay the hub's append-only, signed record.", no_args_is_help=True)


@app.command()
def show(
    folder: Folder = DEFAULT_FOLDER,
    from_sequence: Annotated[int, typer.Option("--from", min=1, help="Number of the first entry.")] = 1,
    kind: Annotated[
        str | None,
        typer.Option(
            metavar="KIND",
            help="Kind of entries: verdict, version, credit, royalty, transfer, ...",
            show_default=False,
        ),
    ] = None,
    contributor: Annotated[
        str | None,
        typer.Option(metavar="ID", help="Show only entries that name this account.", show_default=False),
    ] = None,
    limit: Annotated[
        int | None, typer.Option(min=1, help="Maximum number of entries.", show_default=False)
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Print the entries, oldest first."""
    from itertools import islice

    with opened(folder) as fed:
        from gym_server.cli.show import ledger_lines

        if contributor is None:
            found = fed.ledger.entries(from_sequence)
        else:
            found = fed.ledger.about(contributor, from_sequence)
        selected = islice((entry for entry in found if kind in (None, entry.kind)), limit)
        entries = [entry.to_dict() for entry in selected]
    print_result(as_json, entries, *(line for entry in entries for line in ledger_lines(entry)))


@app.command()
def head(folder: Folder = DEFAULT_FOLDER, as_json: AsJson = False) -> None:
    """Sign the newest entry if it is not signed yet, and print its signed head."""
    with opened(folder) as fed:
        with fed.database.transaction() as tx:
            signed = fed.ledger.sign_head(tx)
        if signed is None:
            raise GymError(
                ErrorCode.NOT_FOUND,
                "the ledger has no entry yet",
                "the first contributor's enrolment writes one",
            )
    if as_json:
        print_json(signed.to_dict())
    else:
        head = signed.head
        out.print(
            f"size {head.size}, round {head.server_round}, hash {head.hash}, root {head.root}, signed by {head.server}"
        )


@app.command()
def verify(
    folder: Folder = DEFAULT_FOLDER,
    ledger: ExportedLedger = None,
    server_id: Annotated[
        str | None,
        typer.Option(
            metavar="ID",
            help="With --ledger: id of the hub that must have signed the file.",
            show_default=False,
        ),
    ] = None,
    root_ledger: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Exported ledger of the root: check a region's links to it.",
            show_default=False,
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Check the chain, heads and signatures, and that every table of the hub agrees with the ledger."""
    from gym_fed.trust.regions.links import RegionLinks

    links = RegionLinks()
    if ledger is not None:
        facts = _verify_file(ledger, server_id, links)
    else:
        if server_id is not None:
            raise GymError(
                ErrorCode.USAGE,
                "--server-id requires --ledger",
                "omit --server-id; a hub's folder has the hub's key",
            )
        with opened(folder) as fed:
            facts = {"server": fed.server, **fed.ledger.verify()}
            for entry in fed.ledger.entries():
                links.add(entry, entry.body)
    if root_ledger is not None:
        facts |= _compared_with(root_ledger, links)
    if as_json:
        print_json({"valid": True, **facts})
    else:
        counts = counts_in_words({name: count for name, count in facts.items() if isinstance(count, int)})
        signed = f"signed by {facts['server']}" if facts["heads"] else "nothing is signed yet"
        out.print(f"valid: {counts}; {signed}")


def _compared_with(root_ledger: Path, links: RegionLinks) -> dict[str, Any]:
    """Compare a region's links with the root's exported ledger; return the figures of the check."""
    from gym_fed.trust.identity.keys import server_id
    from gym_fed.trust.ledger.export import verify_file

    entries: list[Entry] = []
    key, _ = verify_file(root_ledger, None, lambda entry, body: entries.append(entry))
    found = links.compare(server_id(key), entries)
    later = {"links after the end of the root's export": found.later} if found.later else {}
    return {"root": server_id(key), "root versions": found.versions, "root updates": found.updates, **later}


def _verify_file(file: Path, server: str | None, links: RegionLinks) -> dict[str, Any]:
    from gym_fed.trust.identity.keys import server_id
    from gym_fed.trust.ledger.export import verify_file

    key, checked = verify_file(file, None, links.add)
    if server is not None and server_id(key) != server:
        raise GymError(
            ErrorCode.SIGNATURE_INVALID,
            f"{file} is the ledger of {server_id(key)}, not of {server}",
            "get the ledger from that hub",
        )
    late = {"late seeds of evaluations": len(checked.late_seeds)} if checked.late_seeds else {}
    return {"server": server_id(key), "entries": checked.entries, "heads": checked.heads, **late}


@app.command()
def export(
    file: Annotated[Path, typer.Argument(help="A new file of JSON lines.")],
    folder: Folder = DEFAULT_FOLDER,
    as_json: AsJson = False,
) -> None:
    """Write the entries, heads and public key to a file that anyone can verify without the hub."""
    from gym_fed.core.files import atomic_file
    from gym_fed.trust.ledger.export import first_line, lines

    if file.exists():
        raise GymError(ErrorCode.FILE_EXISTS, f"{file} exists", "choose another name")
    with opened(folder) as fed:
        with fed.database.transaction() as tx:
            last = fed.ledger.sign_head(tx)
        if last is None:
            raise GymError(
                ErrorCode.NOT_FOUND,
                "the ledger has no entry yet",
                "the first contributor's enrolment writes one",
            )
        entries = (entry for entry in fed.ledger.entries() if entry.sequence <= last.size)
        with atomic_file(file) as target:
            target.write(first_line(fed.ledger.public_key).encode() + b"\n")
            for line in lines(entries, fed.ledger.heads()):
                target.write(line.encode() + b"\n")
    facts = {"file": str(file), "server": last.head.server, "entries": last.size, "hash": last.head.hash}
    print_result(
        as_json,
        facts,
        f"{counted(last.size, 'entry')} in {file}; check it: gym-server ledger verify --ledger {file}",
    )


@app.command()
def replay(
    server_round: Annotated[int, typer.Argument(metavar="ROUND", min=1, help="Number of a committed round.")],
    folder: Folder = DEFAULT_FOLDER,
    as_json: AsJson = False,
) -> None:
    """Recompute a round's soup from the stored updates, and compare its digest with the ledger's."""
    with spinner("loading torch"):
        from gym_server.rounds.replay import replay as replay_round
        from gym_server.rounds.replay import require_round_plugins

    require_round_plugins(folder, server_round)
    with opened(folder) as fed, spinner(f"recomputing the soup of round {server_round}"):
        replayed = replay_round(fed.state, server_round)
    print_result(
        as_json,
        {"same": True, **replayed},
        f"same: {counted(replayed['updates'], 'update')} merged by {replayed['aggregator']}; result: "
        f"{'' if replayed['replayed'] == replayed['soup'] else 'the integers of '}soup {replayed['soup']}, "
        f"version {replayed['version']}",
    )


@app.command()
def rescore(
    server_round: Annotated[int, typer.Argument(metavar="ROUND", min=1, help="Number of a committed round.")],
    folder: Folder = DEFAULT_FOLDER,
    as_json: AsJson = False,
) -> None:
    """Score a round's updates again with the ledger's method, and compare the scores with the ledger's."""
    with spinner("loading torch"):
        from gym_server.rounds.replay import require_round_plugins
        from gym_server.rounds.replay import rescore as rescore_round

    require_round_plugins(folder, server_round)
    with opened(folder) as fed, spinner(f"scoring the updates of round {server_round} again"):
        rescored = rescore_round(fed.state, fed.config, server_round)
    print_result(
        as_json,
        rescored,
        *(
            f"{update[:12]} {then:+.6f} {'=' if then == now else '!='} {now:+.6f}"
            for update, (then, now) in rescored["scores"].items()
        ),
    )
    if not rescored["same"]:
        raise GymError(
            ErrorCode.STATE_CORRUPT,
            f"round {server_round}: the scores differ from those in the ledger",
            "check that gate.heldout is the set of that round; on other machines, the last digit may differ",
        )


@app.command()
def attribute(
    amount: Annotated[int, typer.Option(min=1, help="Number of credits to split.")],
    folder: Folder = DEFAULT_FOLDER,
    version: Annotated[
        str | None,
        typer.Option(
            metavar="VERSION", help="Number or digest of the version that was used.", show_default=False
        ),
    ] = None,
    variant: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="The .gymdelta file that was used.", show_default=False),
    ] = None,
    usage: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help='File of JSON lines: {"version" or "model": ..., "tokens": N}.',
            show_default=False,
        ),
    ] = None,
    owner: Annotated[
        str | None, typer.Option(metavar="ID", help="With --variant: id of its owner.", show_default=False)
    ] = None,
    owner_share: Annotated[
        float, typer.Option(min=0, max=1, help="With --variant: share of the owner.")
    ] = 0.0,
    policy: Annotated[
        str, typer.Option(metavar="NAME", help="Weights of the rounds: improvement or equal.")
    ] = "improvement",
    record: Annotated[
        bool, typer.Option("--record", help="Pay the credits, and write them to the ledger.")
    ] = False,
    usage_id: Annotated[
        str | None,
        typer.Option(
            metavar="ID",
            help="With --record: id of the usage, which is paid only once.",
            show_default="the usage file's sha256",
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Split credits for the use of a version among all who improved the model up to that version."""
    from typing import cast

    from gym_fed.config.hub.credits import MAX_AMOUNT
    from gym_fed.trust.ledger.royalties import Policy
    from gym_server.ledger.contributors import published_names
    from gym_server.ledger.royalties import Owner, attribute_use, base_of_variant, read_usage
    from gym_server.ledger.royalties import record as record_use

    if amount > MAX_AMOUNT:
        raise GymError(
            ErrorCode.USAGE, f"--amount may be at most {MAX_AMOUNT}", "record larger sums in several parts"
        )
    if sum(given is not None for given in (version, variant, usage)) != 1:
        raise GymError(
            ErrorCode.USAGE, "one of --version, --variant and --usage is required", "pass exactly one"
        )
    if policy not in ("improvement", "equal"):
        raise GymError(ErrorCode.USAGE, f"--policy {policy!r} is unknown", "use improvement or equal")
    if (owner is None) != (owner_share == 0) or (owner is not None and variant is None):
        raise GymError(
            ErrorCode.USAGE,
            "--owner and --owner-share must be used together, and with --variant",
            "for example: --variant FILE --owner ID --owner-share 0.5",
        )
    if usage_id is not None and not record:
        raise GymError(
            ErrorCode.USAGE, "--usage-id requires --record", "add --record; without it, nothing is written"
        )
    used = {version: 1} if version is not None else {}
    if usage is not None:
        used, file_id = read_usage(usage)
        usage_id = usage_id or (file_id if record else None)
    elif variant is not None:
        used = {base_of_variant(variant): 1}
    if record and usage_id is None:
        raise GymError(
            ErrorCode.USAGE,
            "--record requires --usage-id",
            "add an id, so that the usage is credited only once",
        )
    with opened(folder) as fed:
        chosen = cast(Policy, policy)
        shares = attribute_use(
            fed.base, fed.database, used, amount, chosen, Owner(owner, owner_share) if owner else None
        )
        is_new = record_use(fed.state, usage_id, shares) if usage_id is not None else None
        with fed.database.reading() as tx:
            names = published_names(tx, shares.shares)
    if as_json:
        print_json({**shares.to_dict(), "names": names, "usage": usage_id, "recorded": is_new})
        return
    by_round: dict[tuple[int, int], int] = {}
    for share in shares.rounds:  # a round appears once per used version
        where = (share.server_round, share.height)
        by_round[where] = by_round.get(where, 0) + share.amount
    for (server_round, height), part in sorted(by_round.items()):
        out.print(f"round {server_round}, version {height}: {counted(part, 'credit')}")
    for contributor, part in shares.shares.items():
        name = f" ({names[contributor]})" if contributor in names else ""
        out.print(f"{contributor}{name} {part}", markup=False)
    if is_new:
        err.print(f"credited, and recorded in the ledger as usage {usage_id}")
    if is_new is None:
        err.print("nothing was credited; to credit the amount, pass --record")
    if is_new is False:
        err.print(f"usage {usage_id} was recorded before; nothing was credited")
