"""Earlier names of commands and options: hidden from ``--help``, and still accepted with a one-line warning."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import click
import typer
from typer.core import TyperCommand

from gym_fed.core.console import err
from gym_fed.core.renamed import old_name_message


def warn_old_name(old: str, new: str) -> None:
    """Print on standard error that ``old`` is now called ``new``."""
    err.print(f"warning: {old_name_message(old, new)}")


def keep_old_command(
    app: typer.Typer, old: str, new: str, command: Callable[..., Any], cls: type[TyperCommand] | None = None
) -> None:
    """Accept a renamed command under its earlier name, too.

    Args:
        app: Where the earlier name stood.
        old: The whole earlier command (``gym configs ls``); its last word is registered.
        new: The whole command to use instead (``gym configs list``).
        command: The function behind both.
        cls: The class of the command, such as one of ``old_options``.
    """

    @functools.wraps(command)
    def with_warning(*args: Any, **options: Any) -> Any:
        warn_old_name(old, new)
        return command(*args, **options)

    app.command(old.split()[-1], hidden=True, cls=cls)(with_warning)


def old_flag(old: str, new: str) -> Any:
    """The hidden option of a renamed flag, for ``Annotated[bool, old_flag("--force", "--overwrite")]``."""

    def warn(value: bool) -> bool:
        if value:
            warn_old_name(old, new)
        return value

    return typer.Option(old, hidden=True, callback=warn)


def old_options(names: Mapping[str, str]) -> type[TyperCommand]:
    """A class of commands that accepts earlier names of options, with a warning; none is in ``--help``.

    Args:
        names: New name by earlier name, such as ``{"--allow-untranslated": "--ignore-unsupported"}``.
    """

    class Command(TyperCommand):
        old_options = tuple(names)

        def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
            end = args.index("--") if "--" in args else len(args)
            words = [current(word, quiet=ctx.resilient_parsing) for word in args[:end]]
            return super().parse_args(ctx, [*words, *args[end:]])

    def current(word: str, quiet: bool) -> str:
        option, equals, value = word.partition("=")
        if option not in names:
            return word
        if not quiet:  # behind Tab
            warn_old_name(option, names[option])
        return f"{names[option]}{equals}{value}"

    return Command


TakesOut = old_options({"--out": "--output"})
"""The class of the commands whose ``--output`` was ``--out``."""
