"""Draw the lines of a terminal as a grey SVG: they appear one by one, or at once if the reader prefers reduced motion.

Browsers may not apply that preference to an image in a page; the fragment ``#still`` in the file's URL does.
"""

from __future__ import annotations

import io
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence

from rich.console import Console
from rich.terminal_theme import TerminalTheme
from rich.text import Text

from tools.casts.terminal import COLUMNS, Line

MOST_WAIT_SECONDS = 0.4
"""Maximum delay between two lines; longer waits are shortened to it. The page has the real times."""
FRAME = " │"
GREYS = TerminalTheme((24, 24, 24), (216, 216, 216), [(160, 160, 160)] * 8, [(216, 216, 216)] * 8)
SECRETS = re.compile(r"gym://|token=|PRIVATE KEY|BEGIN CERTIFICATE|\bsk-")
"""Patterns of secrets that no picture may show: invites, login links and keys."""

FORMAT = """\
<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img">
<style>
text {{ font: {char_height}px ui-monospace, Menlo, Consolas, "DejaVu Sans Mono", monospace; white-space: pre }}
{styles}
@media (prefers-reduced-motion: no-preference) {{
text {{ animation: appear 1ms both }}
@keyframes appear {{ from {{ opacity: 0 }} }}
DELAYS
}}
#still:target text {{ animation: none }}
</style>
<defs>{lines}</defs>
<rect width="{width}" height="{height}" rx="8" fill="#181818"/>
<g id="still" transform="translate({terminal_x}, 12)">{backgrounds}{matrix}</g>
</svg>
"""


def drawn(name: str, lines: Sequence[Line], short: Mapping[str, str], never: Sequence[str] = ()) -> str:
    """Return the lines as SVG.

    Args:
        name: Prefix of the ids and classes in the file.
        lines: The lines on the terminal.
        short: Paths on this machine, and a replacement for each.
        never: Texts that no line may contain, such as other paths on this machine.

    Raises:
        ValueError: If the lines contain a secret, or one of ``never``.
    """
    console = Console(
        record=True,
        width=COLUMNS,
        file=io.StringIO(),
        force_terminal=True,
        color_system="truecolor",
        legacy_windows=False,
    )
    for line in lines:
        text = Text(no_wrap=True, overflow="crop")
        for stretch, is_bold in _shortened(line.parts, short):
            text.append(stretch, style="bold" if is_bold else "")
        console.print(text, soft_wrap=True, highlight=False)
    console.print()  # rich reserves no space for the last line
    shown = console.export_text(clear=False)
    for pattern in (SECRETS.pattern, *map(re.escape, never)):
        if found := re.search(pattern, shown.replace("\n", "")):  # a path may be split over two lines
            raise ValueError(f"a cast of {name} would show {found[0]!r}")
    svg = console.export_svg(theme=GREYS, code_format=FORMAT, unique_id=name)
    svg = re.sub(r"<text [^>]*>\n</text>", "", svg)  # line ends, which rich draws as text
    return svg.replace("DELAYS", "\n".join(_delays(name, lines)))


def _shortened(parts: Iterable[tuple[str, bool]], short: Mapping[str, str]) -> Iterator[tuple[str, bool]]:
    """Yield the parts with paths replaced; the right border of a frame stays in its column."""
    for stretch, is_bold in parts:
        shorter = stretch
        for path, instead in short.items():
            shorter = shorter.replace(path, instead)
        if shorter != stretch and shorter.endswith(FRAME):
            shorter = shorter.removesuffix(FRAME) + " " * (len(stretch) - len(shorter)) + FRAME
        yield shorter, is_bold


def _delays(name: str, lines: Sequence[Line]) -> list[str]:
    """Return the CSS delay of each line: its time in the recording, with long waits shortened."""
    rules, now, before = [], 0.0, 0.0
    for number, line in enumerate(lines):
        now += min(max(line.second - before, 0.0), MOST_WAIT_SECONDS)
        before = max(line.second, before)
        if line.text:
            rules.append(f'[clip-path="url(#{name}-line-{number})"]{{animation-delay:{now:.2f}s}}')
    return rules
