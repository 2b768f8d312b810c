"""Console output of all commands: text, tables, JSON and error reports.

Results go to standard output and everything else to standard error, so that output can be piped. Strings are plain
text: markup and control characters are not interpreted (``gym_fed.core.text``).
"""

from __future__ import annotations

import atexit
import functools
import gc
import json
import logging
import os
import sys
import textwrap
import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import Annotated, Any, NoReturn

import click
import typer
from click.shell_completion import CompletionItem
from gym_quant.registry import Registry
from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.table import Column, Table
from rich.text import Text
from typer.core import TyperArgument

from gym_fed.core.aliases import OtherWordNote
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.core.library_env import bound_spinning
from gym_fed.core.system_errors import system_error
from gym_fed.core.text import harmless, plain, wrapped
from gym_fed.version import __version__

MAX_CELL = 200
"""Maximum number of characters per cell."""

_SHORT_ID = 9
"""Minimum characters of a shortened id."""


class TextTable(Table):
    """A rich table for untrusted text.

    Args:
        columns: Headings or columns.
        title: Line above the table.
        options: Keyword arguments of ``rich.table.Table``.
    """

    def __init__(self, *columns: str | Column, title: str = "", **options: object) -> None:
        super().__init__(*columns, title_justify="left", **options)  # type: ignore[arg-type]
        if title:
            self.title = Text(plain(title, 1000))

    def add_row(self, *cells: RenderableType | None, style: object = None, end_section: bool = False) -> None:
        """Add a row; strings are shown literally, on one line, and truncated."""
        shown = [Text(plain(cell, MAX_CELL)) if isinstance(cell, str) else cell for cell in cells]
        super().add_row(*shown, style=style, end_section=end_section)  # type: ignore[arg-type]


def short_ids(ids: Iterable[str]) -> dict[str, str]:
    """Map ids to their shortest distinct prefixes, all of the same length."""
    unique = set(ids)
    length = _SHORT_ID
    while len({identifier[:length] for identifier in unique}) < len(unique):
        length += 1
    return {identifier: identifier[:length] for identifier in unique}


MAX_ERROR = 8000
"""Maximum length of an error message in characters."""

PIPE_COLUMNS = 1000
"""Maximum width of a table that is not printed to a terminal; narrower content makes a narrower table."""


_LEAST_WRAPPED = 16
"""Minimum width, in characters, of a column in which words are wrapped."""


class TextConsole(Console):
    """A console that treats strings as plain text: markup only with ``markup=True``, control characters never.

    Control codes that rich generates (styles, cursor movements of a progress bar) are kept.
    """

    def __init__(self, stderr: bool = False) -> None:
        super().__init__(stderr=stderr, markup=False, highlight=False, soft_wrap=True, emoji=False)

    def print(self, *objects: Any, **options: Any) -> None:
        if self.stderr:
            objects = tuple(self.fitted(text) if isinstance(text, str) else text for text in objects)
        super().print(*objects, **options)

    def fitted(self, text: str) -> str:
        """Return a console for standard error that wraps prose on a terminal and does not break lines elsewhere."""
        return wrapped(text, self.width) if self.is_terminal else text

    def render_str(self, text: str, **options: Any) -> Text:
        # Escape control characters before rich silently drops some of them.
        return super().render_str(harmless(text), **options)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        for segment in super().render(renderable, options):
            text, style, control = segment
            yield segment if control is not None else Segment(harmless(text), style)


out = TextConsole()
err = TextConsole(stderr=True)


def print_table(table: Table, width: int | None = None) -> None:
    """Print a table as wide as the terminal or ``width``; in a pipe or a file, rows are never cut."""
    console = out
    if not out.is_terminal:
        table.box = None  # no borders, so that `grep` and `awk` work
    if width is not None or not out.is_terminal:
        console = TextConsole()  # rich prints nothing wider than its console
        console.width = (width if out.is_terminal else None) or PIPE_COLUMNS
    console.print(table)


def print_columns(
    rows: Sequence[Sequence[str]],
    *,
    right: Sequence[int] = (),
    indent: str = "  ",
    wrapped: bool = False,
    to: TextConsole | None = None,
) -> None:
    """Print rows in columns as wide as their content; columns with an index in ``right`` are right-aligned.

    Terminals wrap long lines; in pipes they stay whole. With ``wrapped``, the last column is wrapped within its width,
    or below its row if the terminal is too narrow. ``to`` defaults to standard output.
    """
    to = to or out  # not a default value, which Python would evaluate at import
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for row in rows:
        cells = [
            cell.rjust(width) if column in right else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        start = len(indent) + sum(width + 2 for width in widths[:-1])
        if wrapped and to.is_terminal:
            below = to.width - start < _LEAST_WRAPPED
            column = len(indent) + 4 if below else start
            lines = textwrap.wrap(row[-1], max(to.width - column, _LEAST_WRAPPED))
            cells[-1] = f"\n{' ' * column}".join(["", *lines] if below else lines)
        to.print(f"{indent}{'  '.join(cells).rstrip()}")


def print_json(value: Any) -> None:
    """Print one JSON document to standard output."""
    sys.stdout.write(json.dumps(value, indent=2, sort_keys=True) + "\n")
    sys.stdout.flush()


AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON document.")]
"""``--json`` of the commands whose result is one document."""

AsJsonLines = Annotated[bool, typer.Option("--json", help="Print a line of JSON for each event.")]
"""``--json`` of the commands that run until they are stopped."""


def print_event(event: dict[str, Any]) -> None:
    """Print one line of JSON and flush, for programs that follow a running command."""
    typer.echo(json.dumps(event, sort_keys=True))
    sys.stdout.flush()


def print_result(
    as_json: bool, document: Any, *text: RenderableType | Callable[[], object], note: str = ""
) -> None:
    """Print a command's result: ``document`` with ``--json``, otherwise ``text`` or what it prints when called.

    ``note`` is printed to standard error after the text.
    """
    if as_json:
        print_json(document)
        return
    for part in text:
        if callable(part):
            part()
        elif isinstance(part, Table):
            print_table(part)
        else:
            out.print(part)
    if note:
        err.print(note)


def _print_version(value: bool) -> None:
    if value:
        typer.echo(f"gym-fed {__version__}")
        raise typer.Exit


VersionOption = Annotated[
    bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
]
"""``--version`` of all three commands."""


def _keep_help_of_arguments() -> None:
    """Work around Click 8.5, which discards the help that typer 0.20 sets on arguments."""
    made = TyperArgument.__init__

    @functools.wraps(made)
    def with_help(argument: TyperArgument, *args: Any, help: str | None = None, **options: Any) -> None:
        made(argument, *args, help=help, **options)
        argument.help = help

    TyperArgument.__init__ = with_help  # type: ignore[method-assign, assignment]


_keep_help_of_arguments()


def run_app(app: typer.Typer) -> NoReturn:
    """Run a typer app; a ``GymError`` becomes two readable lines (JSON with ``--json``) and an exit code."""
    bound_spinning()
    warnings.showwarning = _readable_warnings(warnings.showwarning)
    # Torch and transformers create a million long-lived objects; the default threshold would scan them seven times.
    gc.set_threshold(5_000, 10, 10)
    atexit.register(gc.freeze)  # skip the final collection, which takes seconds
    try:
        status = app(standalone_mode=False)
    except GymError as error:
        fail(error)
    except click.exceptions.Abort:
        status = ErrorCode.INTERRUPTED.exit_code
    except click.exceptions.NoArgsIsHelpError as help_text:  # a command group without a command
        help_text.show()
        sys.exit(help_text.exit_code)
    except click.ClickException as error:
        fail(_usage_error(error, app))
    except BrokenPipeError:
        # The reader, such as `head`, has closed the pipe; flushing at exit must not raise again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(ErrorCode.INTERNAL.exit_code)
    except Exception as error:
        refused = system_error(error)
        if refused is None:
            raise
        logging.getLogger("gym_fed").debug("failed", exc_info=error)
        fail(refused)
    if status == ErrorCode.INTERRUPTED.exit_code:  # typer's exit status for Ctrl-C
        fail(GymError(ErrorCode.INTERRUPTED, "interrupted"))
    sys.exit(status if isinstance(status, int) else 0)


def _usage_error(error: click.ClickException, app: typer.Typer) -> GymError:
    """Convert a Click usage error (unknown option, missing argument) to a ``GymError``."""
    near: list[str] = getattr(error, "possibilities", None) or []
    # Typer adds its own suggestion to the message, and Click adds another.
    message = (error.message.partition(" Did you mean")[0] if near else error.format_message()).rstrip(".")
    if near:
        message += f" (did you mean {' or '.join(map(repr, near))}?)"
    context = getattr(error, "ctx", None)
    command = context.command_path if context is not None else _command_of(app, sys.argv)
    if isinstance(error, click.NoSuchOption) and (owner := _owner(context, error.option_name, sys.argv)):
        return GymError(
            ErrorCode.USAGE,
            f"option {error.option_name!r} belongs after the command",
            f"write {command} {owner} {error.option_name} ...",
        )
    return GymError(ErrorCode.USAGE, message[:1].lower() + message[1:], f"see {command} --help")


def _owner(context: click.Context | None, option: str, words: Sequence[str]) -> str | None:
    """Return the subcommand that has ``option``: the one named in ``words``, else the first."""
    commands = getattr(context.command, "commands", {}) if context is not None else {}
    named = [word for word in words if word in commands]
    for name in named or commands:
        if any(option in parameter.opts for parameter in commands[name].params):
            return str(name)
    return None


def _command_of(app: typer.Typer, words: Sequence[str]) -> str:
    """Return the command path in ``words``; Click's error for an option without a value has no context."""
    names, command = [os.path.basename(words[0])], typer.main.get_command(app)
    for word in words[1:]:
        following = getattr(command, "commands", {}).get(word)
        if following is None:
            break
        names.append(word)
        command = following
    return " ".join(names)


def _readable_warnings(before: Callable[..., None]) -> Callable[..., None]:
    """Build a ``warnings.showwarning`` for the commands.

    Alias warnings are printed as one line. Warnings from libraries go to the log, and to ``before`` if Python warnings
    are enabled (``-W``, ``PYTHONWARNINGS``).
    """

    def show(message: Warning | str, category: type[Warning], *place: Any, **more: Any) -> None:
        if issubclass(category, OtherWordNote):
            err.print(f"note: {message}")
        elif sys.warnoptions:
            before(message, category, *place, **more)
        else:
            logging.getLogger("gym_fed").debug("%s: %s", category.__name__, message)

    return show


def wants_json() -> bool:
    """Return True if the command was called with ``--json``."""
    return "--json" in sys.argv


def fail(error: GymError) -> NoReturn:
    """Report an error on standard error (JSON with ``--json``) and exit with its exit code."""
    report_error(error)
    sys.exit(error.exit_code)


def report_error(error: GymError) -> None:
    """Report an error on standard error, as one line of JSON with ``--json``."""
    if wants_json():
        typer.echo(error.to_json_line(), err=True)
    else:
        _print_error(error)
    logging.getLogger("gym_fed").debug("failed", exc_info=error)


def _print_error(error: GymError) -> None:
    """Print an error to standard error as text, even from a rank of a distributed run that prints nothing else."""
    err.quiet = False
    line = Text(err.fitted(harmless(f"error ({error.code.value}): {error.message[:MAX_ERROR]}")))
    line.stylize("red", 0, len("error"))
    err.print(line)
    if error.hint:
        err.print(f"  {error.hint[:MAX_ERROR]}", style="dim")


class MemberName(click.ParamType):  # type: ignore[type-arg]  # generic since click 8.4
    """A parameter type for registry members, as in ``click_type=MemberName(FORMATS, ("auto",))``; imports none.

    Args:
        kind: The registry.
        also: Additional accepted values.
        checked: True to reject other values here; False to leave that to the config that the option sets.
    """

    def __init__(self, kind: Registry[Any], also: tuple[str, ...] = (), *, checked: bool = True) -> None:
        self.name = kind.kind
        self._kind, self._also, self._checked = kind, also, checked

    def words(self) -> tuple[str, ...]:
        """Return all accepted values."""
        return (*self._also, *self._kind.names())

    def get_metavar(self, param: click.Parameter, ctx: click.Context) -> str:
        return f"[{'|'.join(self.words())}]"

    def shell_complete(
        self, ctx: click.Context, param: click.Parameter, incomplete: str
    ) -> list[CompletionItem]:
        return [CompletionItem(word) for word in self.words() if word.startswith(incomplete)]

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if self._checked and value not in self.words():
            self.fail(f"{value!r} is not one of {', '.join(map(repr, self.words()))}.", param, ctx)
        return value
