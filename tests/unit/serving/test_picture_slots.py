"""Requests with pictures: few are read at once, the least served caller is next, and abandoned ones stop."""

from __future__ import annotations

import asyncio
import threading
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

from gym_fed.config.serving import ServingConfig
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.serving.http.app import create_app
from gym_fed.serving.http.gateway import MAX_WAITING, PER_CALLER, SLOTS, Gateway, PictureSlots
from gym_fed.serving.http.keys import Authenticator
from gym_fed.serving.pictures.reader import PictureReader, count_pictures
from gym_fed.serving.setup import open_serving
from tests.support.vision_models import data_url, drawn, image_part, vision_model
from tests.support.wait import SECONDS


def test_few_are_read_at_once_and_fewer_of_one_caller() -> None:
    async def run() -> None:
        slots = PictureSlots()
        for _ in range(PER_CALLER):
            await slots.take("ann", 1)
        third = asyncio.ensure_future(slots.take("ann", 1))
        for number in range(SLOTS - PER_CALLER):
            await slots.take(f"other {number}", 1)
        late = asyncio.ensure_future(slots.take("late", 1))
        await asyncio.sleep(0)
        assert not third.done()
        assert not late.done()
        slots.give_back("ann", 1, 1.0)
        await late
        assert not third.done()
        slots.give_back("ann", 1, 1.0)
        await third

    asyncio.run(run())


def test_who_used_least_is_next_and_a_new_caller_need_not_wait_for_a_queue() -> None:
    async def run() -> list[str]:
        slots, order = PictureSlots(), []

        async def read(caller: str, pictures: int) -> None:
            await slots.take(caller, pictures)
            order.append(caller)
            await asyncio.sleep(0.001)
            slots.give_back(caller, pictures, pictures * 0.5)

        greedy = [asyncio.ensure_future(read(f"greedy {number % 20}", 16)) for number in range(60)]
        while len(order) < 8:
            await asyncio.sleep(0)
        await read("honest", 1)
        await read("honest", 1)
        await asyncio.gather(*greedy)
        assert not slots._waiting
        assert not slots._running
        assert len(slots._seconds) <= 21
        return order

    assert asyncio.run(run())[: 8 + 2 * SLOTS + 2].count("honest") == 2


def test_a_caller_has_few_waiting() -> None:
    async def run() -> None:
        slots = PictureSlots()
        waiting = [asyncio.ensure_future(slots.take("ann", 1)) for _ in range(PER_CALLER + MAX_WAITING)]
        await asyncio.sleep(0)
        with pytest.raises(GymError) as caught:
            await slots.take("ann", 1)
        assert caught.value.code is ErrorCode.BUSY
        waiting[-1].cancel()
        await asyncio.gather(waiting[-1], return_exceptions=True)
        last = asyncio.ensure_future(slots.take("ann", 1))
        for _ in range(PER_CALLER + MAX_WAITING):
            await asyncio.sleep(0)
            slots.give_back("ann", 1, 1.0)
        await last

    asyncio.run(run())


def test_a_slot_that_came_as_its_waiter_left_is_free_again() -> None:
    async def run() -> None:
        slots = PictureSlots()
        for number in range(SLOTS):
            await slots.take(f"caller {number}", 1)
        leaving = asyncio.ensure_future(slots.take("leaving", 1))
        await asyncio.sleep(0)
        slots.give_back("caller 0", 1, 1.0)
        leaving.cancel()
        await asyncio.gather(leaving, return_exceptions=True)
        await asyncio.wait_for(slots.take("next", 1), 1)

    asyncio.run(run())


@pytest.mark.parametrize(
    ("body", "count"),
    [
        ({"messages": [{"role": "user", "content": [image_part("data:")]}]}, 1),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, 1),
        ({"input": "text", "previous_response_id": "resp_1"}, 1),
        ({"input": "text", "previous_response_id": None}, 0),
        ({"messages": [{"role": "user", "content": "image_url"}]}, 0),
        ({"messages": [{"content": [{"type": ["image_url"]}, 5]}, 7], "input": {"a": 1}}, 0),
        ({"messages": {"content": 1}}, 0),
        ([1], 0),
        ("image_url", 0),
    ],
)
def test_bodies_with_pictures_are_known_before_they_are_validated(body: Any, count: int) -> None:
    assert count_pictures(body) == count


@pytest.fixture(scope="module")
def llava(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return vision_model("llava", tmp_path_factory.mktemp("models") / "llava")


def test_texts_are_answered_while_pictures_of_many_requests_wait(
    llava: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    let_go, reading = threading.Event(), threading.Semaphore(0)
    compute = PictureReader.placed

    def slow(self: PictureReader, prompt: Any, owner: str) -> Any:
        if prompt.runs:
            reading.release()
            let_go.wait(SECONDS)
        return compute(self, prompt, owner)

    monkeypatch.setattr(PictureReader, "placed", slow)

    async def run() -> None:
        with open_serving(ServingConfig(base=str(llava), device="cpu", num_threads=1)) as serving:
            gateway = Gateway(Authenticator(None), request_timeout_seconds=60)
            gateway.serving = serving
            transport = httpx.ASGITransport(create_app(gateway))
            async with httpx.AsyncClient(
                transport=transport, base_url="http://127.0.0.1", timeout=SECONDS
            ) as client:

                async def ask(content: Any) -> int:
                    messages = [{"role": "user", "content": content}]
                    body = {"model": serving.served_name, "messages": messages, "max_tokens": 1}
                    return (await client.post("/v1/chat/completions", json=body)).status_code

                picture = [image_part(data_url(drawn(1)))]
                asked = [asyncio.ensure_future(ask(picture)) for _ in range(PER_CALLER + 4)]
                for _ in range(PER_CALLER):
                    await asyncio.to_thread(reading.acquire, timeout=SECONDS)
                try:
                    assert await asyncio.wait_for(ask("hello"), 20) == 200
                    assert not any(one.done() for one in asked)
                finally:
                    let_go.set()
                assert await asyncio.gather(*asked) == [200] * len(asked)

    asyncio.run(run())


def test_pictures_of_a_client_that_left_are_not_read(llava: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The client leaves while the first of eight is read."""
    started, go_on, read = threading.Event(), threading.Event(), []
    with open_serving(ServingConfig(base=str(llava), device="cpu", num_threads=1)) as serving:
        pictures = serving.service._prompts.pictures
        assert isinstance(pictures, PictureReader)
        process = pictures.processor.process

        def slow(picture: Any, *limits: int) -> Any:
            read.append(picture)
            started.set()
            go_on.wait(SECONDS)
            return process(picture, *limits)

        monkeypatch.setattr(pictures.processor, "process", slow)
        gateway = Gateway(Authenticator(None), request_timeout_seconds=60)
        gateway.serving = serving
        app = create_app(gateway)
        content = [image_part(data_url(drawn(seed))) for seed in range(8)]
        body = httpx.Request(
            "POST",
            "http://test/",
            json={"model": serving.served_name, "messages": [{"role": "user", "content": content}]},
        ).content
        scope = {
            "type": "http",
            "method": "POST",
            "path": "/v1/chat/completions",
            "raw_path": b"/v1/chat/completions",
            "query_string": b"",
            "headers": [(b"content-type", b"application/json"), (b"host", b"127.0.0.1")],
            "http_version": "1.1",
        }

        async def run() -> None:
            given = [{"type": "http.request", "body": body, "more_body": False}]

            async def receive() -> Any:
                if given:
                    return given.pop()
                await asyncio.to_thread(started.wait, SECONDS)
                return {"type": "http.disconnect"}

            async def send(_message: Any) -> None:
                return None

            await app(scope, receive, send)
            go_on.set()
            until = time.monotonic() + 20
            while gateway.picture_slots._running and time.monotonic() < until:
                await asyncio.sleep(0.01)
            assert not gateway.picture_slots._running

        asyncio.run(run())
        assert len(read) == 1
        assert serving.engine.stats().running == 0
