"""A hub's pages while it runs: rounds appear without a reload, and nothing is missed or shown twice after a kill."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.support import chromium
from tests.support.community import HONEST, MALICIOUS, ROUNDS, Community
from tests.support.ports import free_port
from tests.support.wait import until

if TYPE_CHECKING:
    from playwright.sync_api import Page

Start = Callable[..., tuple[Community, str]]
NOTE_EVENTS = """async () => {
  const {on} = await import("/static/app.js");
  window.noted = [];
  for (const kind of ["snapshot", "verdict", "version", "ledger"])
    on(kind, (data, id) => window.noted.push([kind, id, data]));
}"""


def noted(page: Page, *kinds: str) -> list[Any]:
    """The events of these kinds that the page's listeners had."""
    return [one for one in page.evaluate("() => window.noted") if one[0] in kinds]


def _has(page: Page, state: str) -> bool:
    """Whether the page was sent a snapshot of a round in that state."""
    return any(one[2]["state"] == state for one in noted(page, "snapshot"))


def _training(page: Page) -> bool:
    """Whether the page was sent how far the last contributor is, of a round that collects."""
    tasks = [
        task for one in noted(page, "snapshot") if one[2]["state"] == "collecting" for task in one[2]["tasks"]
    ]
    return any(
        task["name"] == MALICIOUS and (task["phase"], task["total"]) == ("train", 25) for task in tasks
    )


def _hold_merge(page: Page, folder: Path) -> None:
    """Keep the hub from committing the round until the page was sent that it merges."""
    with closing(sqlite3.connect(folder / "hub.db", isolation_level=None)) as database:
        states = "select state from rounds order by server_round desc limit 1"
        until(lambda: database.execute(states).fetchone()[0] in ("merging", "committed"), "the merge")
        database.execute("begin immediate")
        until(lambda: _has(page, "merging"), "the merging round")
        database.execute("rollback")


def last_sequence(folder: Path) -> int:
    with closing(sqlite3.connect(f"file:{folder / 'hub.db'}?mode=ro", uri=True)) as database:
        return int(database.execute("select max(sequence) from ledger").fetchone()[0] or 0)


@pytest.fixture
def community(tmp_path: Path) -> Iterator[Start]:
    """Starts a hub with a dashboard, public or with its token; gives its URL too."""
    started: list[Community] = []

    def start(is_public: bool, num_rounds: int = ROUNDS) -> tuple[Community, str]:
        address = f"127.0.0.1:{free_port()}"
        pages = {"listen": address, "public": is_public}
        started.append(Community(tmp_path / str(len(started)), num_rounds, dashboard=pages))
        hub = started[-1].start().hub
        assert hub.process is not None
        assert hub.process.stdout is not None
        url = f"http://{address}/"
        if not is_public:
            url = json.loads(hub.process.stdout.readline())["url"]
        return started[-1], url

    yield start
    for one in started:
        one.close()


@pytest.mark.slow  # that screens follow a round is in test_hub_screens.py
def test_rounds_appear_with_their_verdicts_and_reasons_and_without_a_reload(
    community: Start, page: Page, watch: chromium.Watch
) -> None:
    played, url = community(False, 1)
    page.goto(url)
    chromium.settled(page)
    page.evaluate(NOTE_EVENTS)
    played.join()

    def seen(step: str) -> None:
        if step == "at work":
            until(lambda: _training(page), step)
        elif step == f"{MALICIOUS} contributed":
            _hold_merge(page, played.hub.folder)

    # A page is sent a state four times a second, so each is awaited while it lasts.
    until(lambda: _has(page, "open"), "the open round")
    played.play(seen)
    until(lambda: _has(page, "committed"), "the last state")
    until(lambda: noted(page, "version") != [], "the version, behind which no verdict comes")
    verdicts = {one[2]["body"]["contributor"]: one[2]["body"] for one in noted(page, "verdict")}
    assert len(verdicts) == len(HONEST) + 1
    assert sum("times the median" in json.dumps(one) for one in verdicts.values()) == 1
    states = [one[2]["state"] for one in noted(page, "snapshot")]
    assert {"open", "collecting", "merging", "committed"} == set(states)


def test_a_page_of_a_killed_hub_resumes_where_it_was_when_the_hub_is_back(
    community: Start, page: Page, watch: chromium.Watch
) -> None:
    played, url = community(True)
    watch.allowed += ["ERR_CONNECTION_REFUSED", "ERR_INCOMPLETE_CHUNKED_ENCODING", "ERR_CONNECTION_RESET"]
    page.goto(url)
    chromium.settled(page)
    page.evaluate(NOTE_EVENTS)
    began = last_sequence(played.hub.folder)
    played.join()
    played.play()
    page.wait_for_function("() => window.noted.some(([kind]) => kind === 'version')")
    played.hub.kill()
    page.wait_for_selector("#connection[data-state=lost]")
    played.start()
    played.join(("dora",))  # an entry that the page may miss while it is away
    page.wait_for_selector("#connection[data-state=live]")
    until(lambda: noted(page, *BY_ID)[-1][1] == last_sequence(played.hub.folder), "the missed entries")
    assert [one[1] for one in noted(page, *BY_ID)] == [
        *range(began + 1, last_sequence(played.hub.folder) + 1)
    ]


def test_a_page_whose_login_ended_with_the_hub_shows_the_login(
    community: Start, page: Page, watch: chromium.Watch
) -> None:
    played, url = community(False)
    watch.allowed += ["ERR_", "401"]
    page.goto(url)
    chromium.settled(page)
    page.wait_for_selector("#connection[data-state=live]")
    played.hub.kill()
    page.wait_for_selector("#connection[data-state=lost]")
    played.start()
    page.wait_for_selector("form.login")


BY_ID = ("verdict", "version", "ledger")
