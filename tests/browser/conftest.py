"""A Chromium for each worker, pages that are watched, a hub with its dashboard, a workbench.

Whatever a test looks at, it fails when a page logs an error, throws one, sends a request to another host or gets an
answer of 500 and more. ``watch.allowed`` has the patterns of what a test causes on purpose.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.support import chromium
from tests.support.made_once import made_once
from tests.support.wait import SECONDS

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

REPOSITORY = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Served:
    """A face under test.

    Attributes:
        address: Without a token.
        url: With the token, as it is printed.
        folder: Of the hub, or of the workbench.
        parameters: What the URLs of its screens need: ``{"round": "1"}``.
    """

    address: str
    url: str
    folder: Path
    parameters: dict[str, str]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Every test of this folder needs a browser."""
    reason = chromium.why_not()
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.browser)
            if reason:
                item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(scope="module", autouse=True)
def _warm_children_of_workbenches(warm_children: None) -> None:
    """Views and jobs of a workbench have imported the project already."""


@pytest.fixture(scope="package")
def browser() -> Iterator[Browser]:
    """One for each worker. It ends with the package: its event loop would be in the way of other tests' loops."""
    with chromium.chromium() as found:
        yield found


@contextmanager
def watched_pages(browser: Browser) -> Iterator[Callable[..., tuple[Page, chromium.Watch]]]:
    """Opens pages, each in a fresh context; at the end none may have had a problem."""
    opened: list[tuple[Page, chromium.Watch]] = []

    def make(**options: Any) -> tuple[Page, chromium.Watch]:
        context = browser.new_context(viewport={"width": 1440, "height": 900}, **options)
        context.set_default_timeout(1000 * SECONDS)
        page = context.new_page()
        opened.append((page, chromium.Watch(page)))
        return opened[-1]

    yield make
    found = [problem for _, watch in opened for problem in watch.problems()]
    for page, _ in opened:
        page.context.close()
    assert found == []


@pytest.fixture
def open_page(browser: Browser) -> Iterator[Callable[..., tuple[Page, chromium.Watch]]]:
    """Opens pages for one test."""
    with watched_pages(browser) as open_one:
        yield open_one


@pytest.fixture
def watched(open_page: Callable[..., tuple[Page, chromium.Watch]]) -> tuple[Page, chromium.Watch]:
    """A page and its watch."""
    return open_page()


@pytest.fixture
def page(watched: tuple[Page, chromium.Watch]) -> Page:
    """A page."""
    return watched[0]


@pytest.fixture
def watch(watched: tuple[Page, chromium.Watch]) -> chromium.Watch:
    """What ``page`` did."""
    return watched[1]


@pytest.fixture(scope="session")
def played(tmp_path_factory: pytest.TempPathFactory, worker_id: str) -> Path:
    """The folder of a hub whose rounds are committed; made once for all workers."""
    from tests.support.community import ROUNDS, Community

    def play(folder: Path) -> None:
        community = Community(folder)
        try:
            community.start().join()
            for _ in range(ROUNDS):
                community.play()
        finally:
            community.close()

    return made_once(tmp_path_factory, worker_id, "community", play) / "hub"


@pytest.fixture(scope="module")
def hub(played: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """The dashboard of a hub after its rounds, on a copy of its folder for this file of tests."""
    from gym_server.federation import Federation
    from gym_server.store.tables import accounts
    from gym_server.web.dashboard import Dashboard
    from sqlalchemy import select

    folder = tmp_path_factory.mktemp("dashboard") / "hub"
    shutil.copytree(played, folder)
    with Federation.open(folder) as fed:
        dashboard = Dashboard(fed, "127.0.0.1:0", public=False, is_running=False)
        dashboard.start()
        with fed.database.reading() as tx:
            known = {"round": "1", "id": str(tx.scalar(select(accounts.c.contributor)))}
        yield Served(dashboard.server.address, dashboard.server.url, folder, known)
        dashboard.stop()


RUN, DATA = "nano-sft", "my.jsonl"


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory, worker_id: str) -> Path:
    """A folder as somebody works in it: recipes, rows, two finished runs; made once for all workers."""
    from gym_fed.data.generated import generate
    from tests.support.warm import run

    def train(folder: Path) -> None:
        shutil.copytree(REPOSITORY / "configs", folder / "configs")
        rows = [*generate("double", 40, seed=1), *generate("copy", 40, seed=2)]
        (folder / DATA).write_text("".join(json.dumps(row) + "\n" for row in rows))
        small = ("max_steps=24", "per_device_train_batch_size=8", "logging_steps=2", "device=cpu")
        small += ("data.0.num_examples=200",)
        sets = [word for one in small for word in ("--set", one)]
        done = run(["gym", "train", "configs/nano-sft.yaml", *sets], cwd=folder, env=_quiet())
        assert done.returncode == 0, done.stderr[-2000:]
        shutil.copytree(folder / "runs" / RUN, folder / "runs" / "again")

    return made_once(tmp_path_factory, worker_id, "bench", train)


@pytest.fixture(scope="module")
def webui(trained: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A workbench in a copy of that folder, for this file of tests."""
    from gym_fed.webui.app import open_webui
    from gym_fed.webui.workbench import open_workbench

    folder = tmp_path_factory.mktemp("webui") / "bench"
    shutil.copytree(trained, folder)
    workbench = open_workbench(folder, folder / "runs")
    job = workbench.jobs.start(["gym", "--version"], title="the version")
    server = open_webui(workbench, "127.0.0.1:0", "bench")
    server.start()
    yield Served(server.address, server.url, folder, {"path": RUN, "name": DATA, "id": job.id})
    server.stop()


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """The page of `gym-client ui` in a new home, for this file of tests."""
    from gym_client.identity.home import Home
    from gym_client.web.app import open_ui

    home = Home.open(tmp_path_factory.mktemp("client") / "home")
    server, jobs = open_ui(home, "127.0.0.1:0")
    server.start()
    yield Served(server.address, server.url, home.folder, {})
    for job in jobs.list():
        jobs.stop(job.id)
    server.stop()


def _quiet() -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
