"""The screen ``data``: files below the folder alone, rows as a model sees them, in answers that stay small."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

from tests.support.webui_client import webui_client

pytestmark = pytest.mark.usefixtures("warm_children")

CHAT = {
    "messages": [
        {"role": "user", "content": "Which <script>alert(1)</script> is it?"},
        {"role": "assistant", "content": "It is text."},
    ]
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("bench")
    rows = [{**CHAT, "source": "ab"[number % 2]} for number in range(30)]
    rows[7] = {
        "messages": [{"role": "user", "content": "x " * 400}, {"role": "assistant", "content": "long"}]
    }
    lines = [json.dumps(row) for row in rows]
    lines[20] = '{"question": "no such columns"}'
    (found / "data").mkdir()
    (found / "data" / "chats.jsonl").write_text("\n".join(lines))
    (found / "asked.jsonl").write_text('{"question": "2 + 2?", "answer": "4"}\n')
    (found / "large.jsonl").write_text(
        json.dumps({"text": "y" * 10_000_000}) + "\n" + json.dumps(CHAT) + "\n"
    )
    (found / "settings.json").write_text('{"a": 1}')
    (found / "run").mkdir()
    (found / "run" / "metrics.jsonl").write_text("{}\n")
    outside = tmp_path_factory.mktemp("outside") / "secret.jsonl"
    outside.write_text('{"text": "secret"}\n')
    (found / "link.jsonl").symlink_to(outside)
    return found


@pytest.fixture(scope="module")
def client(folder: Path) -> TestClient:
    return webui_client(folder)


def get(client: TestClient, path: str, **query: Any) -> Any:
    response = client.get(f"/api/v1/{path}", params=query)
    assert response.status_code == 200, response.text
    return response.json()


def test_files_are_those_of_rows_below_the_folder(client: TestClient) -> None:
    found = get(client, "data")
    assert [file["name"] for file in found["files"]] == ["asked.jsonl", "data/chats.jsonl", "large.jsonl"]
    assert found["total"] == 3


@pytest.mark.parametrize("name", ["../x.jsonl", "/etc/passwd", "link.jsonl", "data/../../x"])
@pytest.mark.parametrize("view", ["rows", "row", "lengths", "duplicates"])
def test_no_view_leads_out_of_the_folder(client: TestClient, name: str, view: str) -> None:
    assert client.get(f"/api/v1/data/{view}", params={"name": name}).status_code == 403


def test_a_model_outside_of_the_folder_is_refused(client: TestClient) -> None:
    for model, status in (("/etc", 403), ("../other", 403), ("~/model", 404)):
        response = client.get("/api/v1/data/rows", params={"name": "asked.jsonl", "model": model})
        assert response.status_code == status, model


def test_rows_show_roles_and_what_is_learnt(client: TestClient) -> None:
    found = get(client, "data/rows", name="data/chats.jsonl", limit=3)
    assert [row["place"] for row in found["rows"]] == [f"data/chats.jsonl:{line}" for line in (1, 2, 3)]
    assert (found["next"], found["format"]) == (3, "messages")
    parts = found["rows"][0]["sequences"][0]["parts"]
    by_role = {part["role"]: part for part in parts if part["role"]}
    assert by_role["user"] == {"role": "user", "text": CHAT["messages"][0]["content"], "learnt": False}
    assert by_role["assistant"] == {"role": "assistant", "text": "It is text.", "learnt": True}


def test_filters_find_rows_by_words_length_source_and_problem(client: TestClient) -> None:
    def numbers(**query: Any) -> list[int]:
        found = get(client, "data/rows", name="data/chats.jsonl", limit=50, **query)
        return [row["number"] for row in found["rows"]]

    assert numbers(text="X x") == [7]
    assert numbers(least=300) == [7]
    assert 7 not in numbers(most=300)
    assert numbers(column="source", value="b")[:3] == [1, 3, 5]
    assert numbers(only="problems") == [20]


def test_a_row_without_known_columns_gives_place_and_remedy(client: TestClient) -> None:
    [row] = get(client, "data/rows", name="asked.jsonl")["rows"]
    assert row["problem"]["message"].startswith("asked.jsonl:1: no known format")
    assert json.loads(row["raw"]) == {"question": "2 + 2?", "answer": "4"}
    columns = "prompt=question,completion=answer"
    [row] = get(client, "data/rows", name="asked.jsonl", columns=columns)["rows"]
    assert next(part["text"] for part in row["sequences"][0]["parts"] if part["learnt"]) == "4"
    [row] = get(client, "data/rows", name="asked.jsonl", columns="prompt=nothing")["rows"]
    assert "asked.jsonl:1: has no column 'nothing'" in row["problem"]["message"]


def test_a_row_of_ten_megabytes_is_not_sent(client: TestClient) -> None:
    response = client.get("/api/v1/data/rows", params={"name": "large.jsonl"})
    large, small = response.json()["rows"]
    assert len(response.content) < 20_000
    assert "10,000,013 bytes" in large["problem"]["message"]
    assert small["learnt"] > 0
    assert len(client.get("/api/v1/data/row", params={"name": "large.jsonl"}).content) < 20_000


def test_lengths_count_every_row(client: TestClient) -> None:
    found = get(client, "data/lengths", name="data/chats.jsonl")
    assert (len(found["lengths"]), found["unusable"], found["next"]) == (29, 1, None)
    assert found["problems"][0]["message"].startswith("data/chats.jsonl:21:")
    assert get(client, "data/lengths", name="data/chats.jsonl", max_length=20)["cut"] == 29


def test_duplicates_are_found_with_their_places(client: TestClient) -> None:
    found = get(client, "data/duplicates", name="data/chats.jsonl", near=0.8)
    assert found["next"] is None
    assert found["dropped"] == {"exact duplicate": 27}
    first = found["duplicates"][0]
    assert (first["place"], first["earlier"]) == ("data/chats.jsonl:2", "data/chats.jsonl:1")


def test_a_file_without_duplicates_is_written_by_a_job(client: TestClient, folder: Path) -> None:
    (folder / "twice.jsonl").write_text((json.dumps(CHAT) + "\n") * 3)
    job = client.post("/api/v1/data/dedup", json={"name": "twice.jsonl", "near": None}).json()
    assert job["command"][:3] == ["gym", "data", "dedup"]
    until = time.monotonic() + 60
    while get(client, f"jobs/{job['id']}")["status"] == "running":
        assert time.monotonic() < until
        time.sleep(0.1)
    assert get(client, f"jobs/{job['id']}")["exit_code"] == 0
    assert (folder / "twice.unique.jsonl").read_text().count("\n") == 1


def test_changes_need_an_operator(folder: Path) -> None:
    client = webui_client(folder, login=False)
    assert client.get("/api/v1/data").status_code == 401
    assert client.post("/api/v1/data/dedup", json={"name": "asked.jsonl"}).status_code == 401


@pytest.mark.parametrize(
    "query",
    [{"limit": 51}, {"start": -1}, {"model": "m" * 301}, {"columns": "a=b=" * 200}, {"format": "nothing"}],
)
def test_a_request_that_no_page_sends_is_refused(client: TestClient, query: dict[str, Any]) -> None:
    response = client.get("/api/v1/data/rows", params={"name": "asked.jsonl", **query})
    assert response.status_code in (400, 422)
    assert response.json()["error"]["code"] in ("usage", "config-invalid")


def test_registry_and_catalogue_are_listed(
    client: TestClient, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from gym_fed.data.registry import DatasetRegistry

    monkeypatch.setenv("GYM_DATASETS", str(folder / ".store"))
    DatasetRegistry().push("me/asked", folder / "asked.jsonl", licence="CC0-1.0")
    [entry] = get(client, "data/registry")["datasets"]
    assert (entry["name"], entry["version"]) == ("me/asked", 1)
    assert "gsm8k" in {entry["name"] for entry in get(client, "data/catalogue")["entries"]}


def test_hidden_files_those_of_other_suffixes_and_pipes_are_not_read(tmp_path: Path) -> None:
    (tmp_path / ".ssh").mkdir()
    for name in (".ssh/known.txt", ".env.jsonl", "id_rsa", "server.key", "notes.md"):
        (tmp_path / name).write_text("a secret")
    for name in ("pipe.json", "pipe.jsonl"):
        os.mkfifo(tmp_path / name)
    client = webui_client(tmp_path)
    assert get(client, "data")["files"] == []
    for name in (
        ".ssh/known.txt",
        ".env.jsonl",
        "id_rsa",
        "server.key",
        "notes.md",
        "pipe.json",
        "/dev/zero",
    ):
        answer = client.get("/api/v1/data/rows", params={"name": name})
        assert answer.status_code in (403, 404), name
        assert "a secret" not in answer.text


def test_columns_that_are_not_recognised_can_be_chosen_above_the_rows(
    client: TestClient, folder: Path
) -> None:
    (folder / "tickets.csv").write_text(
        'Customer question,"Answer, ours",id\nHow is it reset?,Press the button for long.,7\n',
        encoding="utf-8",
    )
    found = get(client, "data/rows", name="tickets.csv")
    assert found["choices"] == {
        "names": ["Customer question", "Answer, ours", "id"],
        "guess": {"prompt": "Customer question", "completion": "Answer, ours"},
    }
    assert found["rows"][0]["problem"]
    chosen = get(client, "data/rows", name="tickets.csv", columns=json.dumps(found["choices"]["guess"]))
    assert chosen["choices"] == found["choices"]
    assert not chosen["rows"][0]["problem"]
    roles = [part["role"] for part in chosen["rows"][0]["sequences"][0]["parts"] if part["role"]]
    assert roles == ["user", "assistant"]


def test_columns_of_a_known_layout_are_not_asked_for(client: TestClient, folder: Path) -> None:
    for name, text in (
        ("known.jsonl", json.dumps(CHAT)),
        ("prompts.jsonl", '{"prompt": "Write a poem", "difficulty": 3}'),
        ("codes.jsonl", '{"price": 3}'),
    ):
        (folder / name).write_text(text + "\n")
        assert get(client, "data/rows", name=name)["choices"] is None
    (folder / "replies.jsonl").write_text('{"prompt": "Write a poem", "response": "Roses are red."}\n')
    choices = get(client, "data/rows", name="replies.jsonl")["choices"]
    assert choices["guess"] == {"prompt": "prompt", "completion": "response"}
