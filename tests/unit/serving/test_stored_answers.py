"""Stored answers are bounded in time and bytes, per key and in total."""

from __future__ import annotations

import asyncio

import pytest

from gym_fed.config.serving import StoredAnswersConfig
from gym_fed.serving.http import gateway as gateway_module
from gym_fed.serving.openai.catalogue import Caller
from gym_fed.serving.openai.refusals import RequestError
from gym_fed.serving.openai.responses import input_items
from gym_fed.serving.openai.stored_answers import StoredAnswers
from tests.support.scripted_engine import ScriptedEngine
from tests.support.wait import SECONDS
from tests.unit.serving.test_api_app import gateway_over

ANN, BOB = Caller("ann", key_sha256="1"), Caller("bob", key_sha256="2")
SIZE = 10_000


class Clock:
    """A clock that is set by hand."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def put(stored: StoredAnswers, caller: Caller, name: str) -> bool:
    return stored.put(caller, f"resp_{name}", {"text": "x" * (SIZE - 1100)})


def is_there(stored: StoredAnswers, caller: Caller, name: str) -> bool:
    try:
        stored.get(caller, f"resp_{name}", "resp_")
    except RequestError:
        return False
    return True


def test_an_answer_is_forgotten_after_its_time() -> None:
    clock = Clock()
    stored = StoredAnswers(StoredAnswersConfig(keep_seconds=10), clock)
    put(stored, ANN, "a")
    clock.now = 9.9
    assert is_there(stored, ANN, "a")
    clock.now = 10.0
    assert not is_there(stored, ANN, "a")
    assert stored.num_bytes == 0


def test_beyond_a_key_s_share_its_oldest_go() -> None:
    stored = StoredAnswers(StoredAnswersConfig(bytes_per_key=3 * SIZE))
    for number in range(5):
        assert put(stored, ANN, str(number))
        assert stored.num_bytes <= 3 * SIZE
    assert [is_there(stored, ANN, str(number)) for number in range(5)] == [False, False, True, True, True]
    assert not stored.put(ANN, "resp_large", {"text": "x" * 3 * SIZE})
    assert is_there(stored, ANN, "4")


def test_a_key_that_stores_much_takes_no_other_key_s_answers() -> None:
    stored = StoredAnswers(StoredAnswersConfig(bytes_per_key=10 * SIZE, max_bytes=4 * SIZE))
    put(stored, BOB, "b")
    for number in range(20):
        put(stored, ANN, str(number))
        assert stored.num_bytes <= 4 * SIZE
    assert is_there(stored, BOB, "b")
    assert [number for number in range(20) if is_there(stored, ANN, str(number))] == [17, 18, 19]


def test_deleting_gives_back_the_bytes() -> None:
    stored = StoredAnswers(StoredAnswersConfig())
    put(stored, ANN, "a")
    stored.delete(ANN, "resp_a", "resp_")
    assert stored.num_bytes == 0
    with pytest.raises(RequestError):
        stored.delete(ANN, "resp_a", "resp_")


async def test_an_idle_server_forgets_what_is_old(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gateway_module, "FORGET_SECONDS", 0.01)
    clock, gateway = Clock(), gateway_over(ScriptedEngine())
    stored = StoredAnswers(StoredAnswersConfig(keep_seconds=10), clock)
    gateway.serving.service._stored = stored  # type: ignore[union-attr]
    put(stored, ANN, "a")
    watching = asyncio.ensure_future(gateway.watch())
    await asyncio.sleep(0.05)
    assert stored.num_bytes > 0
    clock.now = 10.0
    async with asyncio.timeout(SECONDS):
        while stored.num_bytes:
            await asyncio.sleep(0.01)
    watching.cancel()


def test_pictures_and_texts_of_a_stored_conversation_are_items_again() -> None:
    picture = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA==", "detail": None}}
    messages = [
        {"role": "user", "content": [picture, {"type": "text", "text": "What is it?"}]},
        {"role": "assistant", "content": "A dot."},
    ]
    (item,) = input_items("resp_1", messages)
    assert item["content"] == [
        {"type": "input_image", "image_url": "data:image/png;base64,AA==", "detail": "auto", "file_id": None},
        {"type": "input_text", "text": "What is it?"},
    ]
