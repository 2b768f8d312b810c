"""One server under tabs of a real Chromium: its CPU, the first view, its memory."""

from __future__ import annotations

import os
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path
from urllib.request import urlopen

import psutil

from demo.end_together import end_together
from tests.support.chromium import Watch, chromium
from tests.support.ports import free_port

PAGES = Path(__file__).with_name("_web_pages.py")
START_SECONDS = 120.0
SETTLE_SECONDS = 3.0
"""Left out after a tab was opened."""
CHART = {"ours": ".plot canvas", "gradio": ".vega-embed canvas, .vega-embed svg"}


@dataclass(frozen=True)
class Side:
    """One of the two servers: its name in ``_web_pages.py``, and the Python that runs it."""

    name: str
    python: Path


@dataclass(frozen=True)
class Measured:
    """What a server and its page took.

    Attributes:
        cpu_ms: Milliseconds of CPU in a second, by number of open tabs.
        requests: Of the first view, until a chart is drawn.
        kilobytes: Received by then, of 1,000 bytes.
        chart_seconds: From navigation to the first chart, in a browser that was at work before.
        memory_mb: Resident, after all tabs.
    """

    cpu_ms: dict[int, float]
    requests: int
    kilobytes: float
    chart_seconds: float
    memory_mb: float


def measured(side: Side, tabs: tuple[int, ...], seconds: float, folder: Path) -> Measured:
    """Start the server, look at it, open more and more tabs, and stop it."""
    end_together()
    port = free_port()
    url = f"http://127.0.0.1:{port}/"
    log = folder / f"{side.name}-{port}.log"
    with log.open("wb") as stream:
        command = [str(side.python), str(PAGES), side.name, str(port)]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(PAGES.parents[1])}
        server = psutil.Popen(
            command, stdout=stream, stderr=stream, stdin=subprocess.DEVNULL, env=environment
        )
    try:
        _wait(url, server, log)
        with chromium() as browser:
            browser.new_context().new_page().goto("about:blank")
            context = browser.new_context()
            page = context.new_page()
            watch = Watch(page)
            began = time.monotonic()
            page.goto(url, wait_until="commit")
            page.wait_for_selector(CHART[side.name], timeout=60_000)
            chart_seconds = time.monotonic() - began
            requests, kilobytes = len(watch.requests), watch.num_bytes / 1000
            cpu, opened = {}, 1
            for count in tabs:
                for _ in range(count - opened):
                    tab = browser.new_context().new_page()
                    tab.goto(url, wait_until="commit")
                    tab.wait_for_selector(CHART[side.name], timeout=60_000)
                opened = count
                page.wait_for_timeout(1000 * SETTLE_SECONDS)
                before, at = _cpu(server), time.monotonic()
                page.wait_for_timeout(1000 * seconds)
                cpu[count] = 1000 * (_cpu(server) - before) / (time.monotonic() - at)
                if not cpu[count] > 0:
                    raise RuntimeError(f"{side.name} sent nothing to {count} tabs")
        memory = sum(one.memory_info().rss for one in [server, *server.children(recursive=True)]) / 1e6
        return Measured(cpu, requests, kilobytes, chart_seconds, memory)
    finally:
        server.kill()
        server.wait()


def _cpu(server: psutil.Process) -> float:
    """Seconds that it and its children have used."""
    return sum(sum(one.cpu_times()[:2]) for one in [server, *server.children(recursive=True)])


def _wait(url: str, server: psutil.Popen, log: Path) -> None:
    end = time.monotonic() + START_SECONDS
    while True:
        try:
            urlopen(url, timeout=5).close()
            return
        except OSError as error:
            if server.poll() is not None or time.monotonic() > end:
                raise RuntimeError(f"no server at {url}:\n{log.read_text()[-2000:]}") from error
            time.sleep(0.1)
