"""Options shared by the `gym-server` commands, and a function that opens the hub in ``--dir``."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from gym_fed.core.progress import spinner

if TYPE_CHECKING:
    from gym_server.federation import Federation


Folder = Annotated[
    Path, typer.Option("--dir", metavar="FOLDER", help="The hub's folder.", envvar="GYM_SERVER_DIR")
]
DEFAULT_FOLDER = Path("hub")


@contextmanager
def opened(folder: Path, overrides: tuple[str, ...] = ()) -> Iterator[Federation]:
    """Open the hub in a folder, showing a spinner. Import slow packages inside the block."""
    with spinner("opening the hub"):
        from gym_server.federation import Federation

    with Federation.open(folder, overrides) as fed:
        yield fed
