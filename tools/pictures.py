"""Take the pictures of docs/pictures/: a hub's page after the demo, and the workbench before and after a run.

    python -m tools.pictures [--demo FOLDER]

Each picture is a Chromium screenshot of the real program, in the light and the dark theme. It takes minutes, since the
demo is run and a model is trained; ``--demo`` reuses a finished demo.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING

from gym_server.federation import Federation
from gym_server.web.dashboard import Dashboard
from PIL import Image

from demo.run import main as play
from gym_fed.data.generated import generate
from gym_fed.webui.app import open_webui
from gym_fed.webui.workbench import open_workbench
from tests.support.chromium import THEMES, chromium, settled, why_not

if TYPE_CHECKING:
    from playwright.sync_api import Page

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "docs" / "pictures"
WIDTH, HEIGHT = 1200, 750
HUB = {"hub": "/", "hub-model": "/model", "hub-contributors": "/contributors"}
WEBUI = {"webui": "/train", "webui-run": "/runs/first"}


def main() -> None:
    """Run the demo and the workbench, and write the pictures."""
    parser = argparse.ArgumentParser(prog="python -m tools.pictures", description=__doc__.splitlines()[0])
    parser.add_argument(
        "--demo", type=Path, help="output folder of a finished demo; by default, the demo is run"
    )
    arguments = parser.parse_args()
    if reason := why_not():
        sys.exit(reason)
    FOLDER.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="gym-") as place, chromium() as browser:
        page = browser.new_page(viewport={"width": WIDTH, "height": HEIGHT}, reduced_motion="reduce")
        with _hub(arguments.demo or _demo(Path(place, "demo"))) as urls:
            _take(page, urls, HUB)
        with _webui(Path(place, "my-models")) as urls:
            _take(page, urls, WEBUI)


def _take(page: Page, urls: tuple[str, str], screens: dict[str, str]) -> None:
    url, address = urls
    page.goto(url)  # includes the token
    for name, path in screens.items():
        page.goto(address + path)
        settled(page)
        for theme in THEMES:
            page.emulate_media(color_scheme=theme)  # type: ignore[arg-type]
            page.wait_for_timeout(100)  # charts are redrawn after a frame
            file = FOLDER / f"{name}-{theme}.webp"
            Image.open(BytesIO(page.screenshot())).convert("L").save(file, quality=80, method=6)
            print(f"{file.relative_to(ROOT)}: {file.stat().st_size} bytes")


def _demo(folder: Path) -> Path:
    play(folder)
    return folder


@contextmanager
def _hub(demo: Path) -> Iterator[tuple[str, str]]:
    with Federation.open(demo / "hub") as federation:
        dashboard = Dashboard(federation, "127.0.0.1:0", public=False, is_running=False)
        dashboard.start()
        yield dashboard.server.url, dashboard.server.address
        dashboard.stop()


@contextmanager
def _webui(folder: Path) -> Iterator[tuple[str, str]]:
    folder.mkdir()
    rows = [*generate("double", 400, seed=1), *generate("copy", 400, seed=2)]
    Path(folder, "my.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    gym = str(Path(sys.executable).with_name("gym"))
    options = ("--model", "gym-nano", "--data", "my.jsonl", "--output-dir", "runs/first")
    subprocess.run(
        [gym, "train", *options], cwd=folder, check=True, env={**os.environ, "HF_HUB_OFFLINE": "1"}
    )
    server = open_webui(open_workbench(folder, folder / "runs"), "127.0.0.1:0", folder.name)
    server.start()
    yield server.url, server.address
    server.stop()


if __name__ == "__main__":
    main()
