"""Options that commands about records share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

AllVariants = Annotated[
    Path | None,
    typer.Option(
        "--variants",
        metavar="FOLDER",
        help="Folder of variants; alone, MODEL and all of them.",
    ),
]
FolderOption = Annotated[Path, typer.Option("--output", "-o", metavar="FOLDER", help="Folder of records.")]
