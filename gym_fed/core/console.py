"""The console of all three programs, with their error reports and JSON output.

Results go to standard output, errors and everything else to standard error, so that output can be piped. Strings are
text, never markup, and no control character that is in them reaches the terminal (``gym_fed.core.text``).
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
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import click
import typer
from click.shell_completion import CompletionItem
from gym_quant.registry import Registry
from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from typer.core import TyperArgument

from gym_fed.core.aliases import OtherWordNote
from gym_fed.core.child_process import shut_out_working_folder
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.core.library_env import bound_spinning
from gym_fed.core.system_errors import system_error
from gym_fed.core.text import harmless, wrapped
from gym_fed.version import __version__

if TYPE_CHECKING:
    from rich.table import Table
    from rich.text import Text

MAX_ERROR = 8000
"""Characters of an error's message that are shown."""

PIPE_COLUMNS = 1000
"""Width of a table that is not printed to a terminal; it takes no more than it needs."""


_LEAST_WRAPPED = 16
"""Characters of a column that words are wrapped in."""


class TextConsole(Console):
    """A console to which strings are text: markup only with ``markup=True``, control characters never.

    What rich itself makes (styles, the movements of a progress bar) passes; what is in the text does not.
    """

    def __init__(self, stderr: bool = False) -> None:
        super().__init__(stderr=stderr, markup=False, highlight=False, soft_wrap=True, emoji=False)

    def print(self, *objects: Any, **options: Any) -> None:
        if self.stderr:
            objects = tuple(self.fitted(text) if isinstance(text, str) else text for text in objects)
        super().print(*objects, **options)

    def fitted(self, text: str) -> str:
        """A console that wraps prose on a terminal and keeps lines whole otherwise; used for standard error."""
        return wrapped(text, self.width) if self.is_terminal else text

    def render_str(self, text: str, **options: Any) -> Text:
        # Before rich drops some control characters without a trace.
        return super().render_str(harmless(text), **options)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        for segment in super().render(renderable, options):
            text, style, control = segment
            yield segment if control is not None else Segment(harmless(text), style)


out = TextConsole()
err = TextConsole(stderr=True)


def print_table(table: Table, width: int | None = None) -> None:
    """A table as wide as the terminal, or as ``width``; whole where nobody looks at that: in a pipe or a file."""
    console = out
    if not out.is_terminal:
        table.box = None  # lines of nothing but words, for `grep` and `awk`
    if width is not None or not out.is_terminal:
        console = TextConsole()  # rich never prints wider than its console is
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
    """Print rows of cells in columns as wide as they need; those whose number is in ``right`` end at the right.

    The terminal wraps what is too long, and pipes get whole lines. With ``wrapped`` the last column goes on below
    itself, or stands below its row where a terminal leaves it no room. ``to`` is standard output, unless it is given.
    """
    to = to or out  # that of now: a default is that of the import
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
    """One JSON document on standard output."""
    sys.stdout.write(json.dumps(value, indent=2, sort_keys=True) + "\n")
    sys.stdout.flush()


AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON document.")]
"""``--json`` of the commands whose result is one document."""

AsJsonLines = Annotated[bool, typer.Option("--json", help="Print a line of JSON for each event.")]
"""``--json`` of the commands that run until they are stopped."""


def print_event(event: dict[str, Any]) -> None:
    """One line of JSON, at once, for a program that follows one that runs."""
    typer.echo(json.dumps(event, sort_keys=True))
    sys.stdout.flush()


def print_result(
    as_json: bool, document: Any, *text: RenderableType | Callable[[], object], note: str = ""
) -> None:
    """The result of a command: ``document`` under ``--json``, otherwise ``text``, or what prints it.

    ``note`` goes to standard error, behind the text.
    """
    if as_json:
        print_json(document)
        return
    from rich.table import Table

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
    """Click 8.5 sets the help of an argument to None after typer 0.20 has set it; here typer's stays."""
    made = TyperArgument.__init__

    @functools.wraps(made)
    def with_help(argument: TyperArgument, *args: Any, help: str | None = None, **options: Any) -> None:
        made(argument, *args, help=help, **options)
        argument.help = help

    TyperArgument.__init__ = with_help  # type: ignore[method-assign, assignment]


_keep_help_of_arguments()


def run_app(app: typer.Typer) -> NoReturn:
    """Run a typer app; a ``GymError`` becomes two readable lines (JSON with ``--json``) and an exit code."""
    shut_out_working_folder()
    bound_spinning()
    warnings.showwarning = _readable_warnings(warnings.showwarning)
    # Torch and transformers make a million objects that stay; Python's own threshold goes through them seven times.
    gc.set_threshold(5_000, 10, 10)
    atexit.register(gc.freeze)  # nor need they be gone through once more at the end, which takes seconds
    try:
        status = app(standalone_mode=False)
    except GymError as error:
        fail(error)
    except click.exceptions.Abort:
        status = ErrorCode.INTERRUPTED.exit_code
    except click.exceptions.NoArgsIsHelpError as help_text:  # a group of commands without a command
        help_text.show()
        sys.exit(help_text.exit_code)
    except click.ClickException as error:
        fail(_usage_error(error, app))
    except BrokenPipeError:
        # The reader left, as `| head` does; what is still buffered must not raise again at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(ErrorCode.INTERNAL.exit_code)
    except Exception as error:
        refused = system_error(error)
        if refused is None:
            raise
        logging.getLogger("gym_fed").debug("failed", exc_info=error)
        fail(refused)
    if status == ErrorCode.INTERRUPTED.exit_code:  # typer's own answer to Ctrl-C
        fail(GymError(ErrorCode.INTERRUPTED, "interrupted"))
    sys.exit(status if isinstance(status, int) else 0)


def _usage_error(error: click.ClickException, app: typer.Typer) -> GymError:
    """Click's error of an unknown option, a missing argument and the like, in the form of all other errors."""
    near: list[str] = getattr(error, "possibilities", None) or []
    # Typer puts its own suggestion into the message, click another one behind it.
    message = (error.message.partition(" Did you mean")[0] if near else error.format_message()).rstrip(".")
    if near:
        message += f" (did you mean {' or '.join(map(repr, near))}?)"
    context = getattr(error, "ctx", None)
    command = context.command_path if context is not None else _command_of(app, sys.argv)
    if isinstance(error, click.NoSuchOption) and (owner := _owner(context, error.option_name, sys.argv)):
        return GymError(
            ErrorCode.USAGE,
            f"option {error.option_name!r} belongs behind the command",
            f"write {command} {owner} {error.option_name} ...",
        )
    return GymError(ErrorCode.USAGE, message[:1].lower() + message[1:], f"see {command} --help")


def _owner(context: click.Context | None, option: str, words: Sequence[str]) -> str | None:
    """The subcommand that takes ``option``: the one among ``words``, or the first one if none is named."""
    commands = getattr(context.command, "commands", {}) if context is not None else {}
    named = [word for word in words if word in commands]
    for name in named or commands:
        if any(option in parameter.opts for parameter in commands[name].params):
            return str(name)
    return None


def _command_of(app: typer.Typer, words: Sequence[str]) -> str:
    """The command that ``words`` name. Click gives no context to the error of an option without its value."""
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

    Notes on names are printed as one line. Warnings of libraries are addressed to programmers: they go to the log, and
    to ``before`` where Python was asked for warnings (``-W``, ``PYTHONWARNINGS``).
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
    """True if this command was called with ``--json``."""
    return "--json" in sys.argv


def fail(error: GymError) -> NoReturn:
    """Report on standard error, as one line of JSON with ``--json``, and leave with the error's exit code."""
    report_error(error)
    sys.exit(error.exit_code)


def report_error(error: GymError) -> None:
    """Report on standard error, as one line of JSON with ``--json``."""
    if wants_json():
        typer.echo(error.to_json_line(), err=True)
    else:
        _print_error(error)
    logging.getLogger("gym_fed").debug("failed", exc_info=error)


def _print_error(error: GymError) -> None:
    """An error as all commands report it on standard error without ``--json``."""
    from rich.text import Text

    line = Text(err.fitted(harmless(f"error ({error.code.value}): {error.message[:MAX_ERROR]}")))
    line.stylize("red", 0, len("error"))
    err.print(line)
    if error.hint:
        err.print(f"  {error.hint[:MAX_ERROR]}", style="dim")


class MemberName(click.ParamType):  # type: ignore[type-arg]  # generic since click 8.4
    """``typer.Option("--format", click_type=MemberName(FORMATS, ("auto",)))``; no member is imported.

    Args:
        kind: The registry.
        also: Further words that the option takes.
        checked: Whether another word is refused here; False leaves it to the config that the option sets.
    """

    def __init__(self, kind: Registry[Any], also: tuple[str, ...] = (), *, checked: bool = True) -> None:
        self.name = kind.kind
        self._kind, self._also, self._checked = kind, also, checked

    def words(self) -> tuple[str, ...]:
        """Everything that the option takes."""
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
