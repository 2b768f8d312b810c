"""What the commands of `gym data` share: the names of formats, and progress over rows."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from enum import StrEnum
from typing import Annotated, TypeVar

import typer

from gym_fed.console import err

T = TypeVar("T")

ColumnsOption = Annotated[
    str | None,
    typer.Option(
        "--columns",
        metavar="OURS=THEIRS,...",
        help="What the file calls its columns, such as prompt=question,completion=answer.",
    ),
]
_EVERY = 10_000


class FormatName(StrEnum):
    """Layouts of rows, as ``gym_fed.data.formats`` has them (a test compares the two)."""

    auto = "auto"
    alpaca = "alpaca"
    sharegpt = "sharegpt"
    messages = "messages"
    preference = "preference"
    kto = "kto"
    completion = "completion"
    prompt = "prompt"
    text = "text"


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
