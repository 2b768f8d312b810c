"""Options shared by several commands, with one name, metavar and help text each."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from gym_fed.core.console import MemberName
from gym_fed.core.registries import FORMATS

SetOption = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Set a key, such as a.b=3; repeatable."),
]
AdapterOption = Annotated[
    list[str] | None,
    typer.Option("--adapter", metavar="FOLDER", help="Apply this adapter; repeatable."),
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
        help="Accept a fine-tune with another config or tokenizer than the base; differences are named and left out.",
    ),
]
IgnoreUnsupported = Annotated[
    bool,
    typer.Option("--ignore-unsupported", help="Ignore LLaMA-Factory's keys that have no counterpart."),
]
HOST = typer.Option(
    "--host", metavar="ADDRESS", help="Address to listen on; beyond loopback, keys are needed."
)
PORT = typer.Option("--port", min=0, max=65535, help="Port to listen on; 0 takes a free one.")

KeyName = Annotated[str, typer.Argument(metavar="NAME", help="Name of the key's holder.", show_default=False)]
RoleOption = Annotated[
    Literal["viewer", "operator"],
    typer.Option("--role", help="A viewer only looks; an operator changes things."),
]
ExportedLedger = Annotated[
    Path | None,
    typer.Option(
        "--ledger", metavar="FILE", help="Use this exported ledger instead of the hub.", show_default=False
    ),
]
