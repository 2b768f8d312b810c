"""Labelled paragraphs for a terminal, in which text from a hub cannot imitate a label."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rich.console import Console, ConsoleOptions
from rich.text import Text

_INDENT = 2
MORE = " (more: --json)"
"""Appended to the title if details are omitted."""


@dataclass(frozen=True)
class Term:
    """One of the terms of joining.

    Attributes:
        label: Name of the term; empty if it continues the previous term.
        text: What the user must know before agreeing.
        details: Text that is omitted on a terminal if all terms together would need too many lines.
    """

    label: str
    text: str
    details: str = ""

    def whole(self) -> str:
        """Return the text with its details."""
        return f"{self.text}; {self.details}" if self.details else self.text


class Paragraphs:
    """A list of labelled paragraphs, with indented continuation lines so that only labels start a line.

    If the paragraphs need more than ``max_lines``, the longest details are omitted, and the title says so. If that is
    not enough, paragraphs are joined into shared lines, starting from the bottom. The first and last paragraph are
    never joined.

    Args:
        title: The first paragraph.
        terms: The other paragraphs.
        max_lines: Maximum number of lines.
    """

    def __init__(self, title: Text, terms: Sequence[Term], max_lines: int) -> None:
        self._title, self._terms, self._max_lines = title, terms, max_lines

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Text]:
        def wrap(paragraph: Text) -> list[Text]:
            return _wrap(paragraph, console, options.max_width)

        details = sorted({term.details for term in self._terms if term.details}, key=len)
        paragraphs = self._paragraphs(details)
        blocks = [wrap(paragraph) for paragraph in paragraphs]
        while sum(map(len, blocks)) > self._max_lines and details:
            details.pop()
            paragraphs = self._paragraphs(details)
            blocks = [wrap(paragraph) for paragraph in paragraphs]
        for at in range(len(paragraphs) - 2, 1, -1):
            if sum(map(len, blocks)) <= self._max_lines:
                break
            paragraphs[at - 1 : at + 1] = [Text("; ").join(paragraphs[at - 1 : at + 1])]
            blocks[at - 1 : at + 1] = [wrap(paragraphs[at - 1])]
        for block in blocks:
            yield from block

    def _paragraphs(self, details: Sequence[str]) -> list[Text]:
        is_cut = any(term.details and term.details not in details for term in self._terms)
        paragraphs = [Text.assemble(self._title, MORE if is_cut else "")]
        for term in self._terms:
            text = term.whole() if term.details in details else term.text
            if term.label:
                paragraphs.append(Text.assemble((term.label, "bold"), f": {text}"))
            else:
                paragraphs[-1] = Text.assemble(paragraphs[-1], f"; {text}")
        return paragraphs


def _wrap(paragraph: Text, console: Console, width: int) -> list[Text]:
    """Break a paragraph into lines; all but the first are indented."""
    first = paragraph.wrap(console, width, overflow="fold", no_wrap=False)[0]
    first.rstrip()
    rest = paragraph[len(paragraph) - len(paragraph.plain[len(first) :].lstrip()) :]
    lines = list(rest.wrap(console, max(1, width - _INDENT), overflow="fold", no_wrap=False)) if rest else []
    for line in lines:
        line.rstrip()
        line.pad_left(_INDENT)
    return [first, *lines]
