"""Options that several commands of `gym` share, and checks of options."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import typer

from gym_fed.cli.completion import models, runs, variants
from gym_fed.core.errors import ErrorCode, GymError

BaseOption = Annotated[
    str | None,
    typer.Option(
        "--base",
        metavar="MODEL",
        help="gym-nano, a model folder, or a name on the Hub.",
        autocompletion=models,
        show_default="the variants' base, or gym-nano",
    ),
]
BaseArgument = Annotated[str, typer.Argument(metavar="BASE", help="Model folder or name of the base.")]
TunedArgument = Annotated[
    str,
    typer.Argument(
        metavar="TUNED", help="Model folder of the fine-tune, or a LoRA run.", autocompletion=runs
    ),
]
VariantsOption = Annotated[
    list[str] | None,
    typer.Option(
        "--variant",
        metavar="NAME",
        help="Variant of MODEL, or base for MODEL itself; repeatable.",
        autocompletion=variants,
    ),
]
ApiKeyEnvOption = Annotated[
    str | None, typer.Option("--api-key-env", metavar="NAME", help="Environment variable with the API key.")
]
RecordArgument = Annotated[
    str, typer.Argument(metavar="RECORD", help="Id (or its first characters) or file of a record.")
]
EvaluationSetsOption = Annotated[
    Path | None, typer.Option("--data", metavar="FOLDER", help="Folder of evaluation sets.")
]
PlotOption = Annotated[
    Path | None, typer.Option(help="Plot the errors to this file (.png, .svg, .pdf).", metavar="FILE")
]
DeltaFileOption = Annotated[
    Path, typer.Option("--output", "-o", metavar="FILE", help="The .gymdelta file to write.")
]
OverwriteOption = Annotated[bool, typer.Option("--overwrite", help="Replace the file if it exists.")]
LIMIT = typer.Option("--limit", min=1, help="Maximum number of rows.")
MAX_TOKENS = typer.Option("--max-tokens", min=1, help="Maximum number of tokens per answer.")


def require_new_file(file: Path, overwrite: bool) -> None:
    """Refuse to replace a file without ``--overwrite``.

    Raises:
        GymError: ``FILE_EXISTS``.
    """
    if file.exists() and not overwrite:
        raise GymError(
            ErrorCode.FILE_EXISTS, f"{file} already exists", "choose another name, or pass --overwrite"
        )


def refuse_options(options: Mapping[str, object], reason: str, remedy: str = "leave it out") -> None:
    """Refuse the first option that was given, that is, whose value is neither None nor False.

    Raises:
        GymError: ``USAGE``: the option's name, followed by ``reason``.
    """
    for name, value in options.items():
        if value is not None and value is not False:
            raise GymError(ErrorCode.USAGE, f"{name} {reason}", remedy)


def require_api_key(variable: str) -> str:
    """Return the value of the environment variable that ``--api-key-env`` names.

    Raises:
        GymError: ``USAGE`` if it is not set.
    """
    if not (key := os.environ.get(variable)):
        raise GymError(ErrorCode.USAGE, f"the environment variable {variable} is not set", "export it")
    return key
