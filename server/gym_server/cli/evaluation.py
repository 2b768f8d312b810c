"""`gym-server eval`: versions of a hub on suites of tasks."""

from __future__ import annotations

from typing import Annotated

import typer

from gym_fed.console import AsJson, err, print_result
from gym_fed.waiting import waiting
from gym_server.cli.options import DEFAULT_FOLDER, Folder, opened


def add_evaluation_command(app: typer.Typer) -> None:
    """Register the command of this module."""
    app.command("eval")(evaluate)


def evaluate(
    folder: Folder = DEFAULT_FOLDER,
    version: Annotated[
        list[int] | None,
        typer.Option("--version", help="Height; may be repeated.", show_default="all versions"),
    ] = None,
    suite: Annotated[
        list[str] | None,
        typer.Option("--suite", help="Suite or task; may be repeated.", show_default="gate.evals, or tiny"),
    ] = None,
    limit: Annotated[int, typer.Option(min=1, help="Maximum number of rows of each task.")] = 64,
    chat: Annotated[
        bool | None,
        typer.Option(
            "--apply-chat-template/--no-chat-template",
            help="All prompts in the model's chat template; or none (--no-chat-template).",
            show_default="as gate.evals",
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Evaluate versions of the hub, running or not, and print a table by version."""
    with opened(folder) as fed, waiting("evaluating"):
        from gym_server.evaluations.versions import evaluate_versions, versions_table

        found = evaluate_versions(
            fed,
            version or [],
            suite or [],
            limit,
            chat,
            on_begin=lambda height, name: err.print(f"evaluating version {height} on {name} ..."),
        )
    print_result(as_json, found, versions_table(found))
