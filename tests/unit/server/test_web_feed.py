"""The hub's live events: nothing missed, nothing twice, an idle hub is not read, and a slow page holds up nobody."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from gym_server.federation import Federation
from gym_server.store.tables import accounts
from gym_server.web.feed import HubFeed
from sqlalchemy.exc import OperationalError

from gym_fed.core.errors import GymError
from gym_fed.web.events import QUEUE_LENGTH, Feed, PageEvent
from tests.support.loopback_hub import LoopbackHub
from tests.support.wait import SECONDS

ANN = "c" + "1" * 32
NASTY = '</p><script>alert("x")</script>'


class Page:
    """An open page, and what it was sent."""

    def __init__(self, feed: Feed, last: str | None = None, *, operator: bool = False) -> None:
        self._stream: Any = feed.response(last, "127.0.0.1", operator=operator).body_iterator

    async def next(self) -> tuple[str, int | None, Any]:
        """The next event: its kind, its id, its data."""
        text = (await asyncio.wait_for(anext(self._stream), SECONDS)).decode()
        fields = dict(line.split(": ", 1) for line in text.strip().split("\n"))
        number = int(fields["id"]) if "id" in fields else None
        return fields["event"], number, json.loads(fields["data"])

    async def until(self, sequence: int) -> list[int]:
        """Ids of the entries that come, up to this one."""
        ids: list[int] = []
        while not ids or ids[-1] < sequence:
            kind, number, _ = await self.next()
            assert kind != "reload"
            if kind in ("verdict", "version", "ledger") and number is not None:
                ids.append(number)
        return ids

    async def close(self) -> None:
        await self._stream.aclose()


@pytest.fixture
def fed(tmp_path: Path) -> Iterator[Federation]:
    hub = LoopbackHub(tmp_path / "hub")
    yield hub.fed
    hub.close()


@pytest.fixture
def live(fed: Federation) -> Iterator[HubFeed]:
    feed = HubFeed(fed.state, fed.live_config, fed.lease_histories)
    feed.start()
    yield feed
    feed.stop()


def write(fed: Federation, count: int = 1, kind: str = "verdict", **body: Any) -> int:
    """Append entries; gives the last one's sequence."""
    sequence = 0
    with fed.database.transaction() as tx:
        for number in range(count):
            entry = fed.ledger.append(tx, kind, {"server_round": 1, "number": number, **body})
            sequence = entry.sequence
    return sequence


async def test_a_new_page_is_sent_the_position_and_the_state_and_then_what_happens(
    fed: Federation, live: HubFeed
) -> None:
    with fed.database.transaction() as tx:
        row = {"contributor": ANN, "name": NASTY, "public_key": b"1", "status": "active", "enrolled_at": 0.0}
        tx.execute(accounts.insert().values(**row))
    before = write(fed, 3)
    page = Page(live.feed)
    assert await page.next() == ("position", before, {"sequence": before})
    assert (await page.next())[0] == "snapshot"
    now = write(fed, 1, contributor=ANN, verdict="rejected", reason=NASTY * 100, updates=["a" * 64] * 5000)
    kind, number, data = await page.next()
    while kind == "snapshot":
        kind, number, data = await page.next()
    assert (kind, number, data["sequence"]) == ("verdict", now, now)
    assert (data["name"], data["body"]["contributor"]) == (NASTY, ANN)
    assert data["body"]["num_updates"] == 5000
    assert len(data["body"]["reason"]) == 400
    assert "updates" not in data["body"]
    await page.close()


async def test_a_page_that_comes_back_is_sent_what_it_missed_and_nothing_twice(
    fed: Federation, live: HubFeed
) -> None:
    last = write(fed, 4)
    page = Page(live.feed, str(last - 3))
    assert await page.until(last) == [last - 2, last - 1, last]
    await page.close()
    at_the_end = Page(live.feed, str(last))
    assert [(await at_the_end.next())[0] for _ in range(2)] == ["position", "snapshot"]
    await at_the_end.close()


@pytest.mark.parametrize("behind", [501, -1])
async def test_a_page_that_missed_too_much_or_saw_more_than_there_is_reloads(
    behind: int, fed: Federation, live: HubFeed
) -> None:
    last = write(fed, 502)
    page = Page(live.feed, str(last - behind))
    assert (await page.next())[0] == "reload"
    await page.close()
    page = Page(live.feed, str(last - 500))
    assert len(await page.until(last)) == 500
    await page.close()


@pytest.mark.parametrize("last", ["-1", "9" * 30, "1; drop table ledger", "٣", "\x00", "1e3"])
async def test_a_hostile_last_event_id_counts_as_none(last: str, fed: Federation, live: HubFeed) -> None:
    write(fed)
    page = Page(live.feed, last)
    assert (await page.next())[0] == "position"
    await page.close()


async def test_entries_come_without_a_gap_however_pages_come_and_go(fed: Federation, live: HubFeed) -> None:
    ended = threading.Event()

    def keep_writing() -> None:
        while not ended.wait(0.02):
            write(fed)

    writer = threading.Thread(target=keep_writing)
    writer.start()
    try:
        for pause in (0.0, 1.3, 0.05):
            page = Page(live.feed)
            kind, began, _ = await page.next()
            assert (kind, began is not None) == ("position", True)
            assert began is not None
            ids = await page.until(began + 12)
            assert ids == list(range(began + 1, ids[-1] + 1))
            await page.close()
            await asyncio.sleep(pause)
    finally:
        ended.set()
        writer.join()


async def test_an_idle_hub_is_not_read_however_many_pages_are_open(fed: Federation, live: HubFeed) -> None:
    pages = [Page(live.feed) for _ in range(10)]
    for page in pages:
        assert [(await page.next())[0] for _ in range(2)] == ["position", "snapshot"]
    await asyncio.sleep(0.6)
    looks = live.looks
    await asyncio.sleep(1.0)
    assert live.looks == looks
    last = write(fed)
    for page in pages:
        assert await page.until(last) == [last]
        await page.close()
    assert live.looks > looks


async def test_a_database_that_is_away_is_waited_for(
    fed: Federation, live: HubFeed, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = Page(live.feed)
    await page.next()
    whole, failed = live._entries, threading.Event()

    def away(after: int, most: int) -> list[PageEvent]:
        if not failed.is_set():
            failed.set()
            raise OperationalError("select", {}, Exception("disk I/O error"))
        return whole(after, most)

    monkeypatch.setattr(live, "_entries", away)
    last = write(fed, 2)
    assert await page.until(last) == [last - 1, last]
    assert failed.is_set()
    await page.close()


async def test_a_slow_page_is_sent_reload_and_the_others_are_not() -> None:
    feed = Feed(lambda last: [PageEvent("position", {}, 0)])
    slow, quick = Page(feed), Page(feed)
    assert (await slow.next())[0] == (await quick.next())[0] == "position"
    for number in range(1, QUEUE_LENGTH + 10):
        feed.publish(PageEvent("ledger", {}, number))
        assert (await quick.next())[1] == number
    assert (await slow.next())[0] == "reload"
    with pytest.raises(StopAsyncIteration):
        await slow.next()
    assert len(feed) == 1
    await quick.close()
    assert not feed.has_readers.is_set()


async def test_a_viewer_gets_no_event_for_operators() -> None:
    private = PageEvent("secret", {}, for_operators=True)
    feed = Feed(lambda last: [private, PageEvent("begin", {})])
    viewer, operator = Page(feed), Page(feed, operator=True)
    assert (await viewer.next())[0] == "begin"
    assert [(await operator.next())[0] for _ in range(2)] == ["secret", "begin"]
    feed.publish(private)
    feed.publish(PageEvent("open", {}))
    assert (await viewer.next())[0] == "open"
    assert [(await operator.next())[0] for _ in range(2)] == ["secret", "open"]
    await viewer.close()
    await operator.close()


async def test_streams_are_bounded_for_an_address_and_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gym_fed.web.events.MAX_READERS_OF_ADDRESS", 2)
    monkeypatch.setattr("gym_fed.web.events.MAX_READERS", 3)
    feed = Feed(lambda last: [PageEvent("begin", {})])
    streams: list[Any] = []

    async def opened(address: str) -> None:
        streams.append(feed.response(None, address).body_iterator)
        await anext(streams[-1])

    await opened("a")
    await opened("a")
    with pytest.raises(GymError, match="too many pages"):
        feed.response(None, "a")
    await opened("b")
    with pytest.raises(GymError, match="too many pages"):
        feed.response(None, "c")
    await streams[0].aclose()
    await opened("a")
    for stream in streams[1:]:
        await stream.aclose()
    assert len(feed) == 0
    assert not feed.has_readers.is_set()


def test_a_feed_ends_at_once(fed: Federation) -> None:
    feed = HubFeed(fed.state, fed.live_config, fed.lease_histories)
    feed.stop()
    feed = HubFeed(fed.state, fed.live_config, fed.lease_histories)
    feed.start()
    began = time.monotonic()
    feed.stop()
    assert time.monotonic() - began < 9, (
        "a second is the longest of its waits but for that of an idle hub, ten"
    )
