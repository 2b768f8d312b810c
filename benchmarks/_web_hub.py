"""A hub under its dashboard: what the pages add to its memory and to the time of its rounds."""

from __future__ import annotations

import selectors
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
from gym_server.federation import Federation
from gym_server.store.tables import accounts
from gym_server.web.dashboard import Dashboard
from sqlalchemy import select

from demo.end_together import end_together
from tests.support.chromium import Watch, chromium, settled
from tests.support.community import Community
from tests.support.large_hub import fill
from tests.support.loopback_hub import LoopbackHub
from tests.support.ports import free_port
from tests.support.screens import screens

READERS_OF_ADDRESS = 50
"""A hub feeds 64 pages of one address; loopback has many addresses."""
SETTLE_SECONDS = 2.0
OPEN_SECONDS = 30.0


def first_view_of_hub(folder: Path) -> tuple[int, float, float]:
    """Requests, kilobytes and seconds until the dashboard's first screen is shown, after one round."""
    end_together()
    with played(folder, dashboard=True, num_rounds=2) as (community, url):
        community.join()
        community.play()
        with chromium() as browser:
            browser.new_context().new_page().goto("about:blank")
            page = browser.new_context().new_page()
            watch = Watch(page)
            began = time.monotonic()
            page.goto(url, wait_until="commit")
            settled(page)
            seconds = time.monotonic() - began
            page.wait_for_timeout(500)
            if problems := watch.problems():
                raise RuntimeError(f"the page failed: {problems}")
            return len(watch.requests), watch.num_bytes / 1000, seconds


def screens_of_large_hub(folder: Path, num_rounds: int, turns: int) -> dict[str, list[float]]:
    """Seconds until each screen of a hub with 200 contributors is shown whole, each in a fresh context, by its URL."""
    hub = LoopbackHub(folder)
    fill(hub.fed, num_rounds)
    hub.close()
    found: dict[str, list[float]] = {}
    with (
        Federation.open(folder) as fed,
        Dashboard(fed, "127.0.0.1:0", public=False, is_running=False) as pages,
    ):
        pages.start()
        with fed.database.reading() as tx:
            known = {"round": str(num_rounds), "id": str(tx.scalar(select(accounts.c.contributor)))}
        with chromium() as browser:
            for _ in range(turns):
                for screen in screens():
                    if screen.face == "hub":
                        context = browser.new_context(viewport={"width": 1440, "height": 900})
                        page = context.new_page()
                        page.request.get(
                            pages.url
                        )  # the cookie alone: files of the page are still to be fetched
                        watch = Watch(page)
                        began = time.monotonic()
                        page.goto(pages.server.address + screen.url(known), wait_until="commit")
                        settled(page)
                        found.setdefault(screen.pattern, []).append(time.monotonic() - began)
                        failed = page.locator("#main .state.failed, form.login").count()
                        if failed or watch.problems():
                            raise RuntimeError(f"{screen.pattern} failed: {watch.problems()}")
                        context.close()
    return found


def added_memory(folder: Path) -> float:
    """Megabytes that a hub with a dashboard and one reader holds beyond the same hub without."""
    end_together()
    found = []
    for dashboard in (False, True):
        with played(folder / str(dashboard), dashboard=dashboard, num_rounds=1) as (community, url):
            community.join()
            with readers(url, 1 if dashboard else 0):
                community.play()
                time.sleep(SETTLE_SECONDS)
                found.append(psutil.Process(community.hub.pid).memory_full_info().uss / 1e6)
    return found[1] - found[0]


def rounds_with_readers(folder: Path, rounds: int, num_readers: int) -> tuple[list[float], list[float]]:
    """Seconds of the rounds without readers, and of those with; they take turns, so that each pair is of one time."""
    end_together()
    without: list[float] = []
    with_readers: list[float] = []
    with played(folder, dashboard=True, num_rounds=rounds + 1) as (community, url):
        community.join()
        community.play()  # what is loaded in the first round is nobody's cost
        for number in range(rounds):
            is_read = (number % 4) in (1, 2)  # neither side is always the second of a pair
            with readers(url, num_readers if is_read else 0):
                began = time.monotonic()
                community.play()
                (with_readers if is_read else without).append(time.monotonic() - began)
    return without, with_readers


@contextmanager
def played(folder: Path, *, dashboard: bool, num_rounds: int) -> Iterator[tuple[Community, str]]:
    """A hub that listens, and the URL of its pages."""
    address = f"127.0.0.1:{free_port()}"
    config = {"dashboard": {"listen": address, "public": True}} if dashboard else {}
    community = Community(folder, num_rounds, **config)
    try:
        yield community.start(), f"http://{address}/"
    finally:
        community.close()


@contextmanager
def readers(url: str, number: int) -> Iterator[None]:
    """Streams of a hub's events that are read until the block ends.

    Raises:
        RuntimeError: When a stream is refused, or was sent nothing.
    """
    host, _, port = url.split("/")[2].partition(":")
    opened = []
    for at in range(number):
        source = f"127.0.1.{1 + at // READERS_OF_ADDRESS}"
        stream = socket.create_connection((host, int(port)), 10, (source, 0))
        stream.sendall(f"GET /events HTTP/1.1\r\nHost: {host}:{port}\r\n\r\n".encode())
        opened.append(stream)
    counts = [0] * number
    reader = threading.Thread(target=_read, args=(opened, counts))
    reader.start()
    deadline = time.monotonic() + OPEN_SECONDS
    while (
        number and min(counts) == 0
    ):  # pages stay open over many rounds: that they open is not a cost of one
        if time.monotonic() > deadline:
            raise RuntimeError(f"of {number} readers {counts.count(0)} were sent nothing")
        time.sleep(0.05)
    first = list(counts)
    try:
        yield
    finally:
        for stream in opened:
            with suppress(OSError):
                stream.shutdown(socket.SHUT_RDWR)
        reader.join()
    if unfed := sum(last == begun for last, begun in zip(counts, first, strict=True)):
        raise RuntimeError(f"of {number} readers {unfed} were sent nothing of the round")


def _read(streams: list[socket.socket], counts: list[int]) -> None:
    """Count the events of every stream, in one thread, until all have ended."""
    with selectors.DefaultSelector() as selector:
        for at, stream in enumerate(streams):
            selector.register(stream, selectors.EVENT_READ, at)
        while selector.get_map():
            for key, _ in selector.select():
                stream = streams[key.data]
                try:
                    data = stream.recv(65536)
                except ConnectionResetError:  # the hub's end of it met more to read
                    data = b""
                if data:
                    counts[key.data] += data.count(b"event: ")
                else:
                    selector.unregister(stream)
                    stream.close()
