"""Kept conversations of `play`: what is stored, who may read it, and what is refused."""

from __future__ import annotations

import stat
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

from gym_fed.webui import chats
from tests.support.webui_client import webui_client

API = "/api/v1/play/chats"
ANSWER = {"base": "gym-nano", "label": "gym-nano", "text": "an answer"}


def chat(prompt: str = "hello", **more: Any) -> dict[str, Any]:
    return {
        "system": "be brief",
        "turns": [{"prompt": prompt, "attempts": [[ANSWER], [ANSWER]], "shown": 1}],
        **more,
    }


@pytest.fixture
def client(tmp_path: Path) -> TestClient:
    return webui_client(tmp_path)


def test_a_conversation_is_kept_with_every_answer(client: TestClient, tmp_path: Path) -> None:
    id = client.post(API, json=chat("  what is\na soup? ")).json()["id"]
    (listed,) = client.get(API).json()["chats"]
    assert (listed["id"], listed["title"], listed["turns"]) == (id, "what is a soup?", 1)
    found = client.get(f"{API}/{id}").json()
    assert found["system"] == "be brief"
    assert [len(answers) for answers in found["turns"][0]["attempts"]] == [1, 1]
    file = tmp_path / "runs" / chats.FOLDER / f"{id}.json"
    assert stat.S_IMODE(file.stat().st_mode) == 0o600


def test_a_title_stays_when_the_conversation_goes_on(client: TestClient) -> None:
    id = client.post(API, json=chat()).json()["id"]
    assert client.put(f"{API}/{id}", json=chat(title="Soups")).status_code == 200
    assert client.put(f"{API}/{id}", json=chat("other")).status_code == 200
    assert client.get(API).json()["chats"][0]["title"] == "Soups"
    assert client.get(f"{API}/{id}").json()["turns"][0]["prompt"] == "other"


def test_the_newest_are_listed_and_all_are_counted(client: TestClient, tmp_path: Path) -> None:
    for number in range(3):
        client.post(API, json=chat(f"chat {number}"))
    broken = tmp_path / "runs" / chats.FOLDER / f"{9:012d}-{'0' * 12}.json"
    broken.write_text("[]")
    found = client.get(API).json()
    assert (found["total"], found["unreadable"], len(found["chats"])) == (4, 1, 3)
    assert len(client.get(API, params={"limit": 2}).json()["chats"]) == 1, "the unreadable one is the newest"


def test_a_deleted_conversation_is_gone(client: TestClient, tmp_path: Path) -> None:
    id = client.post(API, json=chat()).json()["id"]
    assert client.delete(f"{API}/{id}").status_code == 200
    assert client.get(f"{API}/{id}").status_code == 404
    assert client.put(f"{API}/{id}", json=chat()).status_code == 404
    assert list((tmp_path / "runs" / chats.FOLDER).iterdir()) == []


def test_what_is_no_conversation_is_refused(client: TestClient, monkeypatch: pytest.MonkeyPatch) -> None:
    for wrong in (
        {"turns": []},
        chat(title="x" * 81),
        chat(key="x"),
        {"turns": [{"prompt": "x", "attempts": []}]},
    ):
        assert client.post(API, json=wrong).status_code == 400
    for id in ("../../key", "..%2f..%2fkey", "x" * 200):
        assert client.get(f"{API}/{id}").status_code == 404
    assert client.get(API).json()["total"] == 0
    monkeypatch.setattr(chats, "MAX_CHATS", 1)
    assert client.post(API, json=chat()).status_code == 200
    assert client.post(API, json=chat()).json()["error"]["code"] == "quota-exceeded"


def test_viewers_read_no_conversation(tmp_path: Path) -> None:
    viewer = webui_client(tmp_path, login=False, public=True)
    assert viewer.get(API).status_code == 403
    assert viewer.post(API, json=chat()).status_code == 403
