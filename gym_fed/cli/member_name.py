"""An option whose value is the name of a member, such as a format: `--help` lists those of this machine."""

from __future__ import annotations

from typing import Any

import click
from gym_quant.registry import Registry


class MemberName(click.ParamType):  # type: ignore[type-arg]  # generic since click 8.4
    """``typer.Option("--format", click_type=MemberName(FORMATS, ("auto",)))``; no member is imported.

    Args:
        kind: The registry.
        also: Further words that the option takes.
    """

    def __init__(self, kind: Registry[Any], also: tuple[str, ...] = ()) -> None:
        self.name = kind.kind
        self._kind, self._also = kind, also

    def words(self) -> tuple[str, ...]:
        """Everything that the option takes."""
        return (*self._also, *self._kind.names())

    def get_metavar(self, param: click.Parameter, ctx: click.Context) -> str:
        return f"[{'|'.join(self.words())}]"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if value not in self.words():
            self.fail(f"{value!r} is not one of {', '.join(map(repr, self.words()))}.", param, ctx)
        return value
