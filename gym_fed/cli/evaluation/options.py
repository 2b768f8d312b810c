"""Options that commands about records share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

FolderOption = Annotated[Path, typer.Option("--out", metavar="FOLDER", help="The folder of records.")]
