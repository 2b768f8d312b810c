"""The commands that steer rounds: `gym-server pause`, `resume`, `skip`, `rollback`, `recipe show` and `recipe set`."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gym_fed.core.console import AsJson, out, print_json, print_result
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.core.help import App
from gym_fed.core.progress import spinner
from gym_fed.core.text import plain
from gym_server.cli.options import DEFAULT_FOLDER, Folder, opened

if TYPE_CHECKING:
    from gym_fed.config.hub.server import ServerConfig
    from gym_server.rounds.recipes import ConfigText, RecipeChanges


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
    """Start no further rounds until `gym-server resume`; the current round ends as usual."""
    with opened(folder) as fed:
        ended = fed.steering.pause(reason, now)
        state = str(fed.steering.paused())
    text = state if ended is None else f"{state}; round {ended} is aborted"
    print_result(as_json, {"paused": True, "reason": reason, "aborted_round": ended}, text)


def resume(folder: Folder = DEFAULT_FOLDER, as_json: AsJson = False) -> None:
    """Start rounds again after `gym-server pause`."""
    with opened(folder) as fed:
        fed.steering.resume()
    print_result(as_json, {"paused": False}, "rounds start again")


def skip(folder: Folder = DEFAULT_FOLDER, reason: Reason = "", as_json: AsJson = False) -> None:
    """Abort the current round, or end the wait after an aborted one; the next round starts at once."""
    with opened(folder) as fed:
        from gym_server.strategy.backoff import end_wait

        ended = fed.steering.skip(reason)
        waited = ended is None and end_wait(fed.database)
        if ended is None and not waited:
            raise GymError(
                ErrorCode.NOT_FOUND,
                "there is no current round",
                "gym-server status shows what the hub is waiting for",
            )
    text = "the wait is over" if ended is None else f"round {ended} is aborted; the next starts at once"
    print_result(as_json, {"aborted_round": ended, "ended_wait": waited}, text)


def rollback(
    version: Annotated[
        int, typer.Argument(min=0, help="Number of the version; 0 is the base.", show_default=False)
    ],
    folder: Folder = DEFAULT_FOLDER,
    reason: Reason = "",
    as_json: AsJson = False,
) -> None:
    """Go back to a version; the next round starts from it. Later versions stay readable, and credits stay paid."""
    with opened(folder) as fed:
        from gym_server.strategy.backoff import end_wait

        facts = fed.steering.rollback(version, reason)
        end_wait(fed.database)  # a running hub may be waiting after a failed round
    ended = "" if facts.aborted_round is None else f"; round {facts.aborted_round} is aborted"
    print_result(
        as_json,
        {
            "from": {"version": facts.before.height, "digest": facts.before.digest},
            "to": {"version": facts.to.height, "digest": facts.to.digest},
            "aborted_round": facts.aborted_round,
        },
        f"version {facts.to.height} is now current, instead of version {facts.before.height}{ended}; "
        "the next round starts from it",
    )


app = App(help="Show or change the recipe of future rounds.", no_args_is_help=True)


@app.command()
def show(folder: Folder = DEFAULT_FOLDER, as_json: AsJson = False) -> None:
    """Show the current recipe and codec, and which keys of gym-server.yaml they override."""
    with opened(folder) as fed:
        facts = recipe_of(fed.config, fed.source, fed.recipes)
    if as_json:
        print_json(facts)
        return
    for key, value in facts["values"].items():
        out.print(plain(f"{key}: {_shown(value)}{_origin(key, facts['overridden'])}", 1000))
    out.print(f"digest: {facts['digest']}")


@app.command("set")
def change(
    settings: Annotated[
        list[str],
        typer.Argument(help="Keys of recipe or codec, such as recipe.max_steps=40.", show_default=False),
    ],
    folder: Folder = DEFAULT_FOLDER,
    reason: Reason = "",
    as_json: AsJson = False,
) -> None:
    """Change the recipe from the next round on. Contributors see the change and must consent again."""
    changes = dict(_parsed(text) for text in settings)
    with opened(folder) as fed:
        from gym_server.rounds.recipes import with_settings

        known, file = fed.recipes.settings(), _values(fed.source.config())
        settings_after = with_settings(known, changes)
        after = fed.source.config(settings_after)
        values = _values(after)
        # A value equal to the file's is not stored, so that later changes of the file apply again.
        overrides = {
            key: text
            for key, text in settings_after.items()
            if key not in file or values.get(key) != file[key]
        }
        before, fed.config = fed.config, after
        with spinner("checking the data, the base model and the rules"):
            from gym_server.cli.checks_at_start import check_at_start

            check_at_start(fed.state, fed.config, fed.recipes)
        entry = fed.recipes.record(known, overrides, before, after, reason)
    lines = [
        plain(f"{key}: {_shown(difference['before'])} -> {_shown(difference['after'])}", 1000)
        for key, difference in entry["changes"].items()
    ]
    print_result(as_json, entry, *lines, "takes effect in the next round; contributors must consent again")


def recipe_of(config: ServerConfig, source: ConfigText, recipes: RecipeChanges) -> dict[str, Any]:
    """Return the current values, their digest, and the overridden values of the file by key."""
    from gym_server.rounds.recipes import recipe_digest

    values, file = _values(config), _values(source.config())
    overridden = {k: file.get(k) for k in sorted({*values, *file}) if values.get(k) != file.get(k)}
    return {
        "values": values,
        "overridden": overridden,
        "settings": recipes.settings(),
        "digest": recipe_digest(config),
    }


def _values(config: ServerConfig) -> dict[str, Any]:
    from gym_fed.config.hub.task import recipe_values

    return recipe_values(config.recipe, config.codec)


def _parsed(text: str) -> tuple[str, str]:
    """Split a setting into its key and YAML text.

    Raises:
        GymError: ``USAGE`` for a key outside ``recipe`` and ``codec``.
    """
    from gym_fed.config.hub.task import SECTIONS

    key, equals, value = text.partition("=")
    section, _, rest = key.partition(".")
    if not equals or section not in SECTIONS or not rest:
        raise GymError(
            ErrorCode.USAGE,
            f"{plain(text, 80)!r} is not of the form recipe.key=value or codec.key=value",
            "change other keys in gym-server.yaml and restart the hub",
        )
    return key, value


def _origin(key: str, overridden: dict[str, Any]) -> str:
    if key not in overridden:
        return ""
    return f"  (set by gym-server recipe set; gym-server.yaml has {_shown(overridden[key])})"


def _shown(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)
