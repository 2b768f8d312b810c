"""The `gym-server eval`, `compare` and `groups` commands, which evaluate versions and compare them."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gym_fed.core.console import AsJson, TextTable, err, print_result
from gym_fed.core.progress import spinner
from gym_fed.core.text import plain
from gym_server.cli.options import DEFAULT_FOLDER, Folder, opened

if TYPE_CHECKING:
    from gym_server.evaluations.change import VersionChange


def add_evaluation_commands(app: typer.Typer) -> None:
    """Register the commands of this module."""
    app.command("eval")(evaluate)
    app.command()(compare)
    app.command()(groups)


def evaluate(
    folder: Folder = DEFAULT_FOLDER,
    version: Annotated[
        list[int] | None,
        typer.Option("--version", help="Number of the version; repeatable.", show_default="all versions"),
    ] = None,
    suite: Annotated[
        list[str] | None,
        typer.Option(
            "--suite", metavar="NAME", help="Suite or task; repeatable.", show_default="gate.evals, or tiny"
        ),
    ] = None,
    limit: Annotated[int, typer.Option(min=1, help="Maximum number of rows of each task.")] = 64,
    chat: Annotated[
        bool | None,
        typer.Option(
            "--apply-chat-template/--no-chat-template",
            help="Use the chat template.",
            show_default="as gate.evals",
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Evaluate versions of the hub, running or not, and print a table by version."""
    with opened(folder) as fed, spinner("evaluating"):
        from gym_server.evaluations.versions import evaluate_versions, versions_table

        evaluations = evaluate_versions(
            fed.state,
            fed.config,
            version or [],
            suite or [],
            limit,
            chat,
            on_begin=lambda height, name: err.print(f"evaluating version {height} on {name} ..."),
        )
    print_result(as_json, evaluations, versions_table(evaluations))


def compare(
    folder: Folder = DEFAULT_FOLDER,
    version: Annotated[
        int | None,
        typer.Option("--version", help="Number of the version.", show_default="the current version"),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Compare a version with version 0 by held-out loss and retained knowledge; the hub need not be running."""
    with opened(folder) as fed, spinner("comparing a version with version 0") as activity:
        from gym_server.evaluations.change import measure_change
        from gym_server.rounds.hub_model import HubModel

        height = fed.round_store.version(fed.round_store.head().height if version is None else version).height
        model = HubModel.of(fed.state, fed.config)
        change = measure_change(
            model,
            fed.round_store.soups(height),
            height,
            on_begin=lambda total: activity.report(0, total),
            on_done=activity.add,
        )
    warnings = "\n".join(f"warning: {warning}" for warning in change.warnings)
    print_result(as_json, change_as_json(change), "\n".join(change.lines), note=warnings)


def groups(
    folder: Folder = DEFAULT_FOLDER,
    rounds: Annotated[
        int, typer.Option("--rounds", min=2, help="Number of most recent rounds to compare.")
    ] = 10,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", metavar="FOLDER", help="New folder for a variant of each group."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Find contributors whose updates disagree permanently, and measure a variant of the base for each group.

    A held-out row counts for the group whose variant fits it better. Serve the variants with gym api BASE --variants
    FOLDER; using them is optional.
    """
    with opened(folder) as fed, spinner("looking for groups") as activity:
        from sqlalchemy import select

        from gym_server.evaluations.grouping import find_groups
        from gym_server.evaluations.groups import save_groups
        from gym_server.store.tables import accounts

        found = find_groups(
            fed.state, fed.config, output, rounds, on_step=lambda step: activity.report(0, 0, step)
        )
        save_groups(fed.state, found)
        with fed.database.reading() as tx:
            names = {row.contributor: row.name for row in tx.execute(select(accounts))}
    table = TextTable("group", "contributors", "held-out rows", "common", "own", "gain", "offered")
    for number, group in enumerate(found.groups, start=1):
        who = ", ".join(plain(names.get(one, one), 40) for one in group.contributors)
        table.add_row(
            str(number),
            who,
            str(group.num_rows),
            f"{group.common:.4f}",
            f"{group.own:.4f}",
            f"{group.gain:+.4f} ± {group.stderr:.4f}",
            "yes" if group.is_offered else "no",
        )
    print_result(as_json, found.model_dump(), *([table] if found.groups else []), *found.lines)


def change_as_json(change: VersionChange) -> dict[str, Any]:
    """Return the figures with their warnings."""
    return {
        "version": change.height,
        "digest": change.digest,
        "held_out": None if change.held_out is None else change.held_out.as_dict(),
        "retention": None if change.retention is None else change.retention.as_dict(),
        "warnings": change.warnings,
        "notes": change.notes,
    }
