"""What the commands of `gym data` share: the names of formats, and progress over rows."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Annotated, TypeVar

import typer

from gym_fed.console import MemberName, err
from gym_fed.kinds import FORMATS

T = TypeVar("T")

ColumnsOption = Annotated[
    str | None,
    typer.Option(
        "--columns",
        metavar="OURS=THEIRS,...",
        help="What the file calls its columns, such as prompt=question,completion=answer.",
    ),
]
FormatOption = Annotated[
    str,
    typer.Option("--format", click_type=MemberName(FORMATS, ("auto",)), help="How rows are laid out."),
]
_EVERY = 10_000


def counted(items: Iterable[T], what: str) -> Iterator[T]:
    """Pass items on; long work says how far it is, on standard error: a counter on a terminal, lines elsewhere."""
    if not err.is_terminal:
        for number, item in enumerate(items, 1):
            yield item
            if number % _EVERY == 0:
                err.print(f"{number} {what}")
        return

    from rich.progress import Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.completed} {task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=err, transient=True) as bar:
        task = bar.add_task(what, total=None)
        for item in items:
            yield item
            bar.advance(task)
