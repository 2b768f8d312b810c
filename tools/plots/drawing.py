"""Draw a plot as a grey SVG that follows the light or dark theme of its reader."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Callable
from html import escape

from tools.plots.tables import Figure, Plot

WIDTH, LABEL, VALUE = 720, 210, 84
"""Widths in pixels: of the picture, of the labels on the left, and of the figure after the longest bar."""
BAR, BETWEEN, GROUP, LINE = 13, 2, 10, 15
"""Heights in pixels: of a bar, of the space between bars and between groups, and of a line of text."""
LABEL_CHARS, TITLE_CHARS = 30, 90
STYLE = """\
svg { --ground: #fff; --ink: #1a1a1a; --quiet: #6b6b6b }
svg { --a: #1a1a1a; --b: #9a9a9a; --c: #dcdcdc; --d: #fff; --e: #5c5c5c }
@media (prefers-color-scheme: dark) {
svg { --ground: #181818; --ink: #e6e6e6; --quiet: #9a9a9a }
svg { --a: #e6e6e6; --b: #8a8a8a; --c: #4a4a4a; --d: #181818; --e: #b4b4b4 }
}
text { font: 12px system-ui, sans-serif; fill: var(--ink) }
.quiet { fill: var(--quiet) }
.title { font-weight: 600 }
rect { stroke: var(--ink); stroke-width: .5 }
line { stroke: var(--quiet); stroke-width: 1 }
"""
FILLS = "abcde"


def drawn(plot: Plot) -> str:
    """Draw a plot.

    Raises:
        ValueError: If it has more series than there are greys, or no positive figure on a logarithmic axis.
    """
    if len(plot.series) > len(FILLS):
        raise ValueError(f"{plot.title}: {len(plot.series)} series, at most {len(FILLS)}")
    parts, top = _head(plot)
    place = _axis(plot)
    for label, figures in plot.groups:
        shown = [(number, figure) for number, figure in enumerate(figures) if figure is not None]
        lines = textwrap.wrap(label, LABEL_CHARS, max_lines=3, placeholder=" …") or [""]
        height = max(len(lines) * LINE, len(shown) * (BAR + BETWEEN))
        for number, text in enumerate(lines):
            parts.append(_text(LABEL - 8, top + LINE * number + 11, text, anchor="end"))
        for at, (number, figure) in enumerate(shown):
            parts += _bar(FILLS[number], figure, place, top + at * (BAR + BETWEEN))
        top += height + GROUP
    zero = place(0.0)
    parts.append(f'<line x1="{zero:.1f}" x2="{zero:.1f}" y1="{_head(plot)[1] - 4}" y2="{top - GROUP + 4}"/>')
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {top}" width="{WIDTH}" height="{top}">\n'
        f"<title>{escape(plot.title)}</title>\n<style>\n{STYLE}</style>\n"
        f'<rect width="{WIDTH}" height="{top}" style="fill: var(--ground); stroke: none"/>\n'
        + "\n".join(parts)
        + "\n</svg>\n"
    )


def _head(plot: Plot) -> tuple[list[str], int]:
    """Return the title and legend, and the y coordinate below them."""
    title = plot.title + (" (logarithmic)" if plot.log else "")
    lines = textwrap.wrap(title, TITLE_CHARS)
    parts = [_text(8, 18 + LINE * number, text, kind="title") for number, text in enumerate(lines)]
    top, left = 12 + LINE * len(lines), 8
    if len(plot.series) > 1:
        for fill, name in zip(FILLS, plot.series, strict=False):
            room = 30 + 7 * len(name)
            if left + room > WIDTH:
                top, left = top + LINE + 3, 8
            parts.append(f'<rect x="{left}" y="{top}" width="10" height="10" style="fill: var(--{fill})"/>')
            parts.append(_text(left + 14, top + 9, name, kind="quiet"))
            left += room
        top += LINE + 6
    return parts, top + 6


def _axis(plot: Plot) -> Callable[[float], float]:
    """Return a function that maps a value to its offset in pixels from the start of the bars."""
    ends = [
        end
        for _, figures in plot.groups
        for figure in figures
        if figure is not None
        for end in (figure.value, figure.least, figure.most)
        if end is not None
    ]
    first, room = LABEL, WIDTH - LABEL - VALUE
    if plot.log:
        positive = [end for end in ends if end > 0]
        if not positive:
            raise ValueError(f"{plot.title}: no positive figure for a logarithmic axis")
        least = math.floor(math.log10(min(positive)))
        span = max(math.log10(max(positive)) - least, 1e-9)
        return lambda value: first + room * ((math.log10(value) - least) / span if value > 0 else 0.0)
    low, high = min(0.0, *ends), max(0.0, *ends)
    return lambda value: first + room * (value - low) / ((high - low) or 1.0)


def _bar(fill: str, figure: Figure, place: Callable[[float], float], top: int) -> list[str]:
    zero, end = place(0.0), place(figure.value)
    left, width, middle = min(zero, end), abs(end - zero), top + BAR / 2
    parts = [
        f'<rect x="{left:.1f}" y="{top}" width="{width:.1f}" height="{BAR}" style="fill: var(--{fill})"/>'
    ]
    right = max(zero, end)
    if figure.least is not None and figure.most is not None:
        least, most = place(figure.least), place(figure.most)
        parts.append(f'<line x1="{least:.1f}" x2="{most:.1f}" y1="{middle}" y2="{middle}"/>')
        right = max(right, most)
    parts.append(_text(right + 5, top + 11, figure.text, kind="quiet"))
    return parts


def _text(x: float, y: float, text: str, *, kind: str = "", anchor: str = "") -> str:
    classes = f' class="{kind}"' if kind else ""
    end = f' text-anchor="{anchor}"' if anchor else ""
    return f'<text x="{x:.1f}" y="{y}"{classes}{end}>{escape(text)}</text>'
