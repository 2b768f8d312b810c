"""Paragraphs with labels for a terminal, in which text from a hub cannot imitate a label."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import Console, ConsoleOptions
from rich.text import Text

_INDENT = 2


class Paragraphs:
    """Paragraphs of a label and a text; continuation lines are indented, so that only labels begin a line."""

    def __init__(self) -> None:
        self._paragraphs: list[Text] = []

    def add(self, label: str, text: str) -> None:
        """Add a paragraph; an empty label continues the last one."""
        if label:
            self._paragraphs.append(Text.assemble((label, "bold"), text))
        else:
            self._paragraphs[-1].append(f"{' ' if self._paragraphs[-1].plain.endswith(':') else '; '}{text}")

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Text]:
        width = options.max_width
        for paragraph in self._paragraphs:
            first = _wrap(paragraph, console, width)[0]
            yield first
            rest = Text(paragraph.plain[len(first) :].lstrip())
            for line in _wrap(rest, console, max(1, width - _INDENT)) if rest else []:
                line.pad_left(_INDENT)
                yield line


def _wrap(text: Text, console: Console, width: int) -> list[Text]:
    lines = list(text.wrap(console, width, overflow="fold", no_wrap=False))
    for line in lines:
        line.rstrip()
    return lines
