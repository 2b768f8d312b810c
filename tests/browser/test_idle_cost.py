"""What ten open tabs cost the server of each face: at most ten milliseconds of a core in a second, and no request."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
import pytest

from tests.support import chromium

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

NUM_TABS, SECONDS, MOST_MS = 10, 15, 10.0
"""Processor time is compared, which waiting on a busy machine does not change."""
FACES = {
    "webui": (["gym", "webui", "--no-open"], "bench", "/runs/nano-sft"),
    "hub": (["gym-server", "dashboard", "--dir", "hub"], ".", "/"),
    "client": (["gym-client", "ui", "--home", "home", "--no-open"], ".", "/"),
}


@pytest.mark.slow
@pytest.mark.parametrize("face", FACES)
def test_ten_open_tabs_cost_little_and_ask_nothing(
    face: str, played: Path, trained: Path, tmp_path: Path, browser: Browser
) -> None:
    (program, *words), folder, path = FACES[face]
    shutil.copytree(played, tmp_path / "hub")
    shutil.copytree(trained, tmp_path / "bench")
    command = [Path(sys.executable).with_name(program), *words, "--port", "0", "--json"]
    environment = {**os.environ, "HOME": str(tmp_path), "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(
        command, cwd=tmp_path / folder, env=environment, stdout=subprocess.PIPE, text=True
    ) as server:
        assert server.stdout is not None
        try:
            url = json.loads(server.stdout.readline())["url"]
            tabs = [_tab(browser, url, path) for _ in range(NUM_TABS)]
            asked = []
            tabs[0].on("request", lambda request: asked.append(request.url))
            tabs[0].wait_for_timeout(3000)
            asked.clear()
            before, begin = _cpu_seconds(server.pid), time.monotonic()
            tabs[0].wait_for_timeout(1000 * SECONDS)
            spent = 1000 * (_cpu_seconds(server.pid) - before) / (time.monotonic() - begin)
            for tab in tabs:
                tab.context.close()
        finally:
            server.terminate()
    assert spent <= MOST_MS, f"{spent:.1f} ms a second"
    assert asked == []


def _tab(browser: Browser, url: str, path: str) -> Page:
    """Open a screen in a context of its own, since the tabs of one share six connections."""
    page = browser.new_context().new_page()
    page.set_default_timeout(120_000)
    page.goto(url)
    page.goto(url.partition("/login")[0] + path)
    chromium.settled(page)
    return page


def _cpu_seconds(pid: int) -> float:
    times = psutil.Process(pid).cpu_times()
    return times.user + times.system
