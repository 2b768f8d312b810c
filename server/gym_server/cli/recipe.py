"""`gym-server recipe show` and `set`: the training recipe from the next round on."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gym_fed.config.hub.task import SECTIONS, recipe_values
from gym_fed.core.console import AsJson, out, print_json, print_result
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.core.help import App
from gym_fed.core.progress import spinner
from gym_fed.core.text import plain
from gym_server.cli.options import DEFAULT_FOLDER, Folder, opened
from gym_server.cli.steering import Reason

if TYPE_CHECKING:
    from gym_fed.config.hub.server import ServerConfig
    from gym_server.rounds.recipes import ConfigText, RecipeChanges


app = App(help="Show or change the recipe of the rounds to come.", no_args_is_help=True)


@app.command()
def show(folder: Folder = DEFAULT_FOLDER, as_json: AsJson = False) -> None:
    """Show the recipe and codec that hold, and where gym-server.yaml is overridden."""
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
    """Change the recipe from the next round on. Contributors are shown the change, and must consent again."""
    changes = dict(_parsed(text) for text in settings)
    with opened(folder) as fed:
        from gym_server.rounds.recipes import with_settings

        known, file = fed.recipes.settings(), _values(fed.source.config())
        settings_after = with_settings(known, changes)
        after = fed.source.config(settings_after)
        values = _values(after)
        # A value equal to the file's needs no setting, so that it follows the file again.
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
    print_result(as_json, entry, *lines, "it holds from the next round on; contributors are asked again")


def recipe_of(config: ServerConfig, source: ConfigText, recipes: RecipeChanges) -> dict[str, Any]:
    """Return the values in force, the digest, and the file's values that are overridden, by key."""
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
    return recipe_values(config.recipe, config.codec)


def _parsed(text: str) -> tuple[str, str]:
    """Parse a setting to its key and YAML text.

    Raises:
        GymError: ``USAGE`` for a key outside of the two sections.
    """
    key, equals, value = text.partition("=")
    section, _, rest = key.partition(".")
    if not equals or section not in SECTIONS or not rest:
        raise GymError(
            ErrorCode.USAGE,
            f"{plain(text, 80)!r} is not of the form recipe.key=value or codec.key=value",
            "other keys are changed in gym-server.yaml, and hold from the hub's next start",
        )
    return key, value


def _origin(key: str, overridden: dict[str, Any]) -> str:
    if key not in overridden:
        return ""
    return f"  (set by gym-server recipe set; gym-server.yaml says {_shown(overridden[key])})"


def _shown(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)
