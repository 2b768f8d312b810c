"""`gym-server pause`, `resume`, `skip` and `rollback`, for a hub that is running or stopped."""

from __future__ import annotations

from typing import Annotated

import typer

from gym_fed.core.console import AsJson, print_result
from gym_fed.core.errors import ErrorCode, GymError
from gym_server.cli.options import DEFAULT_FOLDER, Folder, opened

Reason = Annotated[
    str, typer.Option(help="Reason, shown to contributors and written to the ledger.", show_default=False)
]


def add_steering_commands(app: typer.Typer) -> None:
    """Register the commands of this module."""
    for command in (pause, resume, skip, rollback):
        app.command()(command)


def pause(
    folder: Folder = DEFAULT_FOLDER,
    reason: Reason = "",
    now: Annotated[
        bool, typer.Option("--now", help="Also end the current round, without a version.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Let no further round begin, until `gym-server resume`; the round under way ends as usual."""
    with opened(folder) as fed:
        ended = fed.steering.pause(reason, now)
        state = str(fed.steering.paused())
    text = state if ended is None else f"{state}; round {ended} is aborted"
    print_result(as_json, {"paused": True, "reason": reason, "aborted_round": ended}, text)


def resume(folder: Folder = DEFAULT_FOLDER, as_json: AsJson = False) -> None:
    """Let rounds begin again after `gym-server pause`."""
    with opened(folder) as fed:
        fed.steering.resume()
    print_result(as_json, {"paused": False}, "rounds begin again")


def skip(folder: Folder = DEFAULT_FOLDER, reason: Reason = "", as_json: AsJson = False) -> None:
    """Abort the round under way now, or end the wait after one that came to nothing; the next begins at once."""
    with opened(folder) as fed:
        from gym_server.strategy.backoff import end_wait

        ended = fed.steering.skip(reason)
        waited = ended is None and end_wait(fed.database)
        if ended is None and not waited:
            raise GymError(
                ErrorCode.NOT_FOUND, "no round is under way", "gym-server status shows what the hub waits for"
            )
    text = "the wait is over" if ended is None else f"round {ended} is aborted; the next begins at once"
    print_result(as_json, {"aborted_round": ended, "ended_wait": waited}, text)


def rollback(
    version: Annotated[
        int, typer.Argument(min=0, help="Number of the version; 0 is the base.", show_default=False)
    ],
    folder: Folder = DEFAULT_FOLDER,
    reason: Reason = "",
    as_json: AsJson = False,
) -> None:
    """Go back to a version: the next round starts from it. Later ones stay readable, and paid credits stay paid."""
    with opened(folder) as fed:
        from gym_server.strategy.backoff import end_wait

        facts = fed.steering.rollback(version, reason)
        end_wait(fed.database)  # a running hub may be waiting after failed rounds
    ended = "" if facts.aborted_round is None else f"; round {facts.aborted_round} is aborted"
    print_result(
        as_json,
        {
            "from": {"version": facts.before.height, "digest": facts.before.digest},
            "to": {"version": facts.to.height, "digest": facts.to.digest},
            "aborted_round": facts.aborted_round,
        },
        f"version {facts.to.height} is the current one, after version {facts.before.height}{ended}; "
        "the next round starts from it",
    )
