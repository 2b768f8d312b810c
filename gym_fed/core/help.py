"""Typer apps with a compact ``--help``, groups with a default command, and options shared by several commands."""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import click
import typer
from typer.core import TyperArgument, TyperCommand, TyperGroup
from typer.models import CommandFunctionType

from gym_fed.core.console import MemberName
from gym_fed.core.registries import FORMATS

AllVariants = Annotated[
    Path | None,
    typer.Option(
        "--variants",
        metavar="FOLDER",
        help="Folder of variants; without --variant: MODEL and all variants.",
    ),
]
FolderOption = Annotated[Path, typer.Option("--output", "-o", metavar="FOLDER", help="Folder of records.")]
SetOption = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Set a key, such as a.b=3; repeatable."),
]
AdapterOption = Annotated[
    list[str] | None,
    typer.Option("--adapter", metavar="FOLDER", help="Apply this adapter; repeatable."),
]
ChatTemplateOption = Annotated[
    str | None,
    typer.Option(
        "--chat-template",
        metavar="NAME",
        help="Chat template: a name such as chatml, a Jinja file, or Jinja text.",
        show_default="the model's own",
    ),
]
ServedVariants = Annotated[
    Path | None,
    typer.Option(
        "--variants",
        metavar="FOLDER",
        help="Folder of variants.",
        show_default="~/.gym-fed/variants, if there",
    ),
]
DEVICE = typer.Option("--device", metavar="DEVICE", help="Device: auto, cpu, cuda or mps.")
FormatOption = Annotated[
    str, typer.Option("--format", click_type=MemberName(FORMATS, ("auto",)), help="Format of the rows.")
]
ColumnsOption = Annotated[
    str | None,
    typer.Option(
        "--columns",
        metavar="OURS=THEIRS",
        help="Names of the file's columns, such as prompt=question.",
        show_default=False,
    ),
]
AgreeOption = Annotated[
    bool,
    typer.Option("--yes", "-y", help="Accept a guess of the columns' names; it is printed."),
]
LicenceOption = Annotated[
    str | None,
    typer.Option(
        "--licence",
        metavar="LICENCE",
        help="SPDX identifier, such as Apache-2.0 or CC-BY-4.0, or LicenseRef-NAME.",
        show_default="not stated",
    ),
]
AllowDifferences = Annotated[
    bool,
    typer.Option(
        "--allow-differences",
        help="Accept a fine-tune whose config or tokenizer differs from the base; differences are listed and skipped.",
    ),
]
IgnoreUnsupported = Annotated[
    bool,
    typer.Option("--ignore-unsupported", help="Ignore LLaMA-Factory's keys that have no counterpart."),
]
HOST = typer.Option(
    "--host", metavar="ADDRESS", help="Address to listen on; pages and APIs beyond loopback need keys."
)
OpenOption = Annotated[
    bool | None, typer.Option("--open/--no-open", help="Open the browser; the default on a terminal.")
]
PORT = typer.Option("--port", min=0, max=65535, help="Port to listen on; 0 = any free port.")

RootPathOption = Annotated[
    str | None,
    typer.Option(
        "--root-path", metavar="PREFIX", help="Path prefix of the URLs at a reverse proxy, such as /gym."
    ),
]
TrustedProxyOption = Annotated[
    list[str] | None,
    typer.Option(
        "--trusted-proxy",
        metavar="ADDRESS",
        help="Trust X-Forwarded-Prefix, -For and -Proto from this IP address or network; needs keys; repeatable.",
    ),
]
KeyName = Annotated[str, typer.Argument(metavar="NAME", help="Name of the key holder.", show_default=False)]
RoleOption = Annotated[
    Literal["viewer", "operator"],
    typer.Option("--role", help="viewer: read-only; operator: may make changes."),
]
ProbeSeconds = Annotated[
    float, typer.Option("--timeout", min=0.1, max=300.0, metavar="SECONDS", help="Time limit of the check.")
]
ExportedLedger = Annotated[
    Path | None,
    typer.Option(
        "--ledger", metavar="FILE", help="Use this exported ledger instead of the hub.", show_default=False
    ),
]


_LONGEST_CHOICES = 48
"""Maximum characters of an option with its choices; longer lists of choices are shown as NAME."""
_BOUNDS = r"(?:[\d.]+<=?)?x(?:[<>]=?[\d.]+)?"
_COLUMN = 26
"""Maximum width of the first column; the help of a longer option is on the next line."""


class Command(TyperCommand):
    """A command whose help lists arguments and options once each, in two columns."""

    def format_arguments(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write nothing, since ``format_options`` writes the arguments."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write arguments, then options in order of declaration."""
        params = self.get_params(ctx)
        for title, is_argument in (("Arguments", True), ("Options", False)):
            records = [
                _plain_record(record)
                for param in params
                if isinstance(param, TyperArgument) == is_argument
                and (record := param.get_help_record(ctx)) is not None
            ]
            if records:
                with formatter.section(title):
                    width = max(
                        (len(names) for names, _ in records if len(names) <= _COLUMN), default=_COLUMN
                    )
                    formatter.write_dl(records, col_max=width)


class CommandGroup(TyperGroup):
    """A command group whose help lists commands one per line, grouped by activity if ``activities`` is set.

    Attributes:
        activities: Maps each activity to its commands and their summaries. Commands without a summary share one line.
    """

    activities: ClassVar[Mapping[str, Mapping[str, str]]] = {}

    def format_help(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the commands by activity; without activities, write the usual help."""
        if not self.activities:
            super().format_help(ctx, formatter)
            return
        name = ctx.command_path
        formatter.write(f"Usage: {name} COMMAND [OPTIONS]\n\n")
        indent = max(map(len, self.activities)) + 1
        width = max(len(command) for rows in self.activities.values() for command in rows) + 1
        for activity, rows in self.activities.items():
            lines = [f"{command:{width}} {text}" for command, text in rows.items() if text]
            if more := ", ".join(command for command, text in rows.items() if not text):
                lines.append(more)
            for number, line in enumerate(lines):
                formatter.write(f"{'' if number else activity:{indent}} {line}".rstrip() + "\n")
        formatter.write(f"\n{name} COMMAND --help shows options; also --version, --install-completion\n")

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write options, then commands."""
        Command.format_options(self, ctx, formatter)  # type: ignore[arg-type]
        self.format_commands(ctx, formatter)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write each command with the first sentence of its help."""
        rows = [
            (name, _first_sentence(command.help or ""))
            for name, command in self.commands.items()
            if not command.hidden
        ]
        if rows:
            with formatter.section("Commands"):
                formatter.write_dl(rows)


class LazyCommandGroup(CommandGroup):
    """A command group that imports a command when it is looked up, so that no command pays for importing the others.

    Attributes:
        sources: Maps each command to the ``module:attribute`` of its function or app.
    """

    sources: ClassVar[Mapping[str, str]] = {}

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.commands = _ImportedCommands(self.sources)


class _ImportedCommands(MutableMapping[str, click.Command]):
    """Commands by name; each is imported on first access."""

    def __init__(self, sources: Mapping[str, str]) -> None:
        self._sources = sources
        self._loaded: dict[str, click.Command | None] = dict.fromkeys(sources)

    def __getitem__(self, name: str) -> click.Command:
        command = self._loaded[name]
        if command is None:
            module, _, attribute = self._sources[name].partition(":")
            command = self._loaded[name] = _as_command(
                name, getattr(importlib.import_module(module), attribute)
            )
        return command

    def __setitem__(self, name: str, command: click.Command) -> None:
        self._loaded[name] = command

    def __delitem__(self, name: str) -> None:
        del self._loaded[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._loaded)

    def __len__(self) -> int:
        return len(self._loaded)


def _as_command(name: str, source: App | Callable[..., Any]) -> click.Command:
    """Build the Click command of an app, or of a function with Typer's annotations."""
    if isinstance(source, App):
        command: click.Command = typer.main.get_group(source)
    else:
        app = App(add_completion=False, pretty_exceptions_enable=False)
        app.command(name)(source)
        command = typer.main.get_command(app)
    command.name = name
    return command


class App(typer.Typer):
    """A Typer app with compact help."""

    def __init__(self, *, cls: type[TyperGroup] = CommandGroup, **options: Any) -> None:
        super().__init__(cls=cls, rich_markup_mode=None, **options)

    def command(
        self, name: str | None = None, *, cls: type[TyperCommand] | None = None, **options: Any
    ) -> Callable[[CommandFunctionType], CommandFunctionType]:
        """Register a command; see ``typer.Typer.command``."""
        return super().command(name, cls=cls or Command, **options)


def _first_sentence(text: str) -> str:
    paragraph = " ".join(text.partition("\n\n")[0].split())
    return re.split(r"(?<=[.;:]) ", paragraph, maxsplit=1)[0].rstrip(".;:")


def _plain_record(record: tuple[str, str]) -> tuple[str, str]:
    """Shorten a help record: NUMBER for numbers, no bounds, no long list of choices, no rich markup."""
    names = re.sub(r" (?:INTEGER|FLOAT)(?: RANGE)?$", " NUMBER", record[0])
    text = record[1].replace("\\[", "[")
    if len(names) > _LONGEST_CHOICES and (choices := re.search(r"\[(.*)\]", names)):
        names = names.replace(choices[0], "NAME")
        text, default, rest = text.partition("  [")
        text = f"{text} ({', '.join(choices[1].split('|'))}){default}{rest}"
    text = re.sub(rf"; {_BOUNDS}\]", "]", text)
    text = re.sub(rf"\[{_BOUNDS}; ", "[", text)
    text = re.sub(rf"\s*\[{_BOUNDS}\]", "", text)
    return names, re.sub(r"default: \((.*)\)\]$", r"default: \1]", text)


class DefaultCommandGroup(CommandGroup):
    """A group that runs ``default_command`` if the first word is not the name of a command."""

    default_command = ""
    runs_without_words = False
    """True to run the default command without any words."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if (self.runs_without_words or args) and self.is_default(args):
            args = [self.default_command, *args]
        return super().parse_args(ctx, args)

    def is_default(self, words: list[str]) -> bool:
        """Return True if the words after the group's name belong to its default command."""
        return words[:1] != ["--help"] and not any(word in self.commands for word in words[:1])
