"""Run the commands of a page of docs/ as its test does, and write their output to it: ``python -m tools.outputs PAGE``.

Only blocks under the line ``MARK`` are rewritten; the commands themselves stay. Standard error is left out.
"""

from __future__ import annotations

import os
import re
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from tests.integration.test_docs import play
from tests.support.hub import BIN

MARK = "<!-- outputs, by tools/outputs -->"
MAX_LINES = 8
"""Maximum lines of output per command; longer output is truncated with a line of dots."""
MAX_CHARS = 110


def main(page: Path) -> None:
    """Run the page's commands in an empty folder, and write the page."""
    with tempfile.TemporaryDirectory(prefix="gym-outputs-") as place:
        environment = {**os.environ, "PATH": f"{BIN}:{os.environ['PATH']}", "GYM_HOME": f"{place}/home"}
        printed = iter(
            [
                (command, text.replace(place, "~"))
                for command, text in play(page, Path(place), environment, environment)
            ]
        )
    page.write_text(written(page.read_text(encoding="utf-8"), printed), encoding="utf-8")


def written(text: str, printed: Iterator[tuple[str, str]]) -> str:
    """Return the page with the outputs below its commands.

    Args:
        text: The page.
        printed: The commands that were run, in order, each with its output.
    """

    def with_outputs(block: re.Match[str]) -> str:
        lines: list[str] = []
        for line in block[1].replace("\\\n", "\0").splitlines():
            if line.startswith("$ "):
                lines.append(line.replace("\0", "\\\n"))
                command = line.removeprefix("$ ").replace("\0", " ")
                lines += (
                    []
                    if command.endswith(" &")
                    else shortened(next(text for ran, text in printed if ran == command))
                )
        return f"{MARK}\n```console\n" + "\n".join(lines) + "\n```"

    return re.sub(rf"{re.escape(MARK)}\n```console\n(.*?)```", with_outputs, text, flags=re.DOTALL)


def shortened(output: str) -> list[str]:
    """Return the lines of an output, truncated for the page."""
    lines = [line.rstrip() for line in output.splitlines() if line.strip()]
    lines = [line if len(line) <= MAX_CHARS else f"{line[: MAX_CHARS - 3]}..." for line in lines]
    return lines if len(lines) <= MAX_LINES else [*lines[: MAX_LINES - 1], "..."]


if __name__ == "__main__":
    main(Path(sys.argv[1]))
