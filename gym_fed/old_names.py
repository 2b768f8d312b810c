"""Earlier names of commands and options: hidden from ``--help``, and still accepted with a one-line warning."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import typer

from gym_fed.console import err


def warn_old_name(old: str, new: str) -> None:
    """Print on standard error that ``old`` is now called ``new``."""
    err.print(f"warning: `{old}` is now `{new}`; the old name will be removed")


def keep_old_command(app: typer.Typer, old: str, new: str, command: Callable[..., Any]) -> None:
    """Accept a renamed command under its earlier name, too.

    Args:
        app: Where the earlier name stood.
        old: The whole earlier command (``gym configs ls``); its last word is registered.
        new: The whole command to use instead (``gym configs list``).
        command: The function behind both.
    """

    @functools.wraps(command)
    def with_warning(*args: Any, **options: Any) -> Any:
        warn_old_name(old, new)
        return command(*args, **options)

    app.command(old.split()[-1], hidden=True)(with_warning)


def old_flag(old: str, new: str) -> Any:
    """The hidden option of a renamed flag, for ``Annotated[bool, old_flag("--force", "--overwrite")]``."""

    def warn(value: bool) -> bool:
        if value:
            warn_old_name(old, new)
        return value

    return typer.Option(old, hidden=True, callback=warn)
