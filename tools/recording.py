"""Record the demo for docs/benchmarks.md: its terminal, and the hub's page at the same time.

    python -m tools.recording

The terminal becomes docs/casts/demo.svg, and the page an animated picture, docs/pictures/demo.webp. It takes as long as
the demo, two minutes on an idle machine; a longer demo is played faster.
"""

from __future__ import annotations

import os
import platform
import sys
import tempfile
import time
from io import BytesIO
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

from gym_server.federation import Federation
from gym_server.web.dashboard import Dashboard
from PIL import Image

from gym_fed.core.errors import GymError
from tests.support.chromium import chromium, settled, why_not
from tools.casts.drawing import drawn
from tools.casts.environment import ROOT
from tools.casts.page import FOLDER as CASTS
from tools.casts.terminal import Running, Terminal
from tools.pictures import FOLDER as PICTURES

if TYPE_CHECKING:
    from playwright.sync_api import Page

PICTURE = PICTURES / "demo.webp"
COMMAND = "python -m demo.run demo"
WIDTH, HEIGHT = 960, 680
QUALITY = 50
INTERVAL_SECONDS = 1.0
"""Interval between pictures of the page."""
MAX_SECONDS, LAST_SECONDS = 110.0, 8.0
"""Longest duration of the animation without its last frame, and the duration of that frame."""
MAX_FRAMES = 60


def main() -> None:
    """Run the demo, record it, and write both files."""
    if reason := why_not():
        sys.exit(reason)
    with tempfile.TemporaryDirectory(prefix="gym-") as place, chromium() as browser:
        variables = {
            "HOME": place,
            "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.defpath]),
            "PYTHONPATH": str(ROOT),
            "TERM": "xterm-256color",
            "LANG": "C.UTF-8",
        }
        terminal = Terminal(Path(place), variables)
        page = browser.new_page(viewport={"width": WIDTH, "height": HEIGHT}, reduced_motion="reduce")
        with terminal.type(COMMAND) as running:
            frames = _frames(page, Path(place, "demo", "hub"), running)
            running.wait()
        never = (place, str(ROOT), str(Path.home()), platform.node())
        cast = drawn("demo", terminal.lines(), {place: "~"}, never)
    (CASTS / "demo.svg").write_text(cast, encoding="utf-8")
    _write(frames, PICTURE)


def _frames(page: Page, hub: Path, running: Running) -> list[tuple[float, bytes]]:
    """Return pictures of the hub's first page until the command ends, each with its time in seconds."""
    frames = []
    with (
        _opened(hub, running) as federation,
        Dashboard(federation, "127.0.0.1:0", public=False, is_running=False) as dashboard,
    ):
        dashboard.start()
        page.goto(dashboard.url)
        settled(page)
        while True:
            is_last = not running.is_alive
            frames.append((time.monotonic(), page.screenshot()))
            if is_last:
                return frames
            page.wait_for_timeout(1000 * INTERVAL_SECONDS)


def _opened(hub: Path, running: Running) -> Federation:
    """Open the hub read-only as soon as the demo has created it.

    Raises:
        RuntimeError: If the demo ends without creating one.
    """
    while True:
        try:
            return Federation.open(hub, read_only=True)
        except (GymError, OSError) as error:
            if not running.is_alive:
                raise RuntimeError(f"the demo made no hub:\n{running.typed.shown[-3000:]}") from error
            time.sleep(0.2)


def _write(frames: list[tuple[float, bytes]], file: Path) -> None:
    """Write the animation, of at most ``MAX_FRAMES`` frames, up to the last change of the page."""
    while len(frames) > 1 and frames[-1][1] == frames[-2][1]:
        frames = frames[:-1]
    step = max(1, -(-len(frames) // MAX_FRAMES))
    chosen = [*frames[:-1:step], frames[-1]]
    speed = max(1.0, (chosen[-1][0] - chosen[0][0]) / MAX_SECONDS)
    seconds = [(end - begin) / speed for (begin, _), (end, _) in pairwise(chosen)]
    pictures = [Image.open(BytesIO(data)).convert("L").convert("RGB") for _, data in chosen]
    pictures[0].save(
        file,
        save_all=True,
        append_images=pictures[1:],
        duration=[round(1000 * each) for each in (*seconds, LAST_SECONDS)],
        loop=0,
        quality=QUALITY,
        method=6,
        minimize_size=True,
    )
    size = file.stat().st_size
    print(f"{file.relative_to(ROOT)}: {len(pictures)} frames, {sum(seconds):.0f} s, {size:,} bytes")


if __name__ == "__main__":
    main()
