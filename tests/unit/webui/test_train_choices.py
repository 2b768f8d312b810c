"""The choices of the screen ``train``: models, files that are uploaded, goals, graders and the memory of models."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from starlette.testclient import TestClient

from gym_fed.config.train.defaults import ROW_KEYS
from gym_fed.web import uploads
from tests.support.webui_client import webui_client

pytestmark = pytest.mark.usefixtures("warm_children")

ROWS = b"".join(b'{"prompt": "%d", "completion": "a"}\n' % number for number in range(200))


@pytest.fixture
def client(tmp_path: Path) -> TestClient:
    return webui_client(tmp_path)


def begin(client: TestClient, name: str, size: int, status: int = 200) -> Any:
    response = client.post("/api/v1/data/uploads", json={"name": name, "bytes": size})
    assert response.status_code == status, response.text
    return response.json()


def part(client: TestClient, id: str, offset: int, content: bytes, status: int = 200) -> Any:
    headers = {"Content-Type": "application/octet-stream"}
    url = f"/api/v1/data/uploads/{id}?offset={offset}"
    response = client.put(url, content=content, headers=headers)
    assert response.status_code == status, response.text
    return response.json()


def upload(client: TestClient, name: str, content: bytes, size: int = 1000) -> str:
    id = begin(client, name, len(content))["id"]
    for at in range(0, len(content), size):
        found = part(client, id, at, content[at : at + size])
        assert (found["name"] is None) == (at + size < len(content))
    return str(found["name"])


def test_an_uploaded_file_is_whole_and_never_replaces_another(client: TestClient, tmp_path: Path) -> None:
    assert [upload(client, "mine.jsonl", ROWS) for _ in range(2)] == ["data/mine.jsonl", "data/mine-2.jsonl"]
    assert (tmp_path / "data/mine.jsonl").read_bytes() == ROWS
    assert [path.name for path in (tmp_path / "data").iterdir() if path.name.startswith(".")] == []
    listed = client.get("/api/v1/train/choices").json()
    assert [file["name"] for file in listed["files"]] == ["data/mine-2.jsonl", "data/mine.jsonl"]


@pytest.mark.parametrize(
    ("name", "size", "said"),
    [
        ("../up.jsonl", 9, "not a safe file name"),
        ("a/b.jsonl", 9, "not a safe file name"),
        (".hidden.jsonl", 9, "not a safe file name"),
        ("nul\x00.jsonl", 9, "not a safe file name"),
        ("program.py", 9, "this file type has no rows"),
        ("empty.jsonl", 0, "is empty"),
        ("huge.jsonl", 2**49, "the disk has room for"),
    ],
)
def test_a_file_that_cannot_be_taken_is_refused_before_anything_is_written(
    client: TestClient, tmp_path: Path, name: str, size: int, said: str
) -> None:
    response = client.post("/api/v1/data/uploads", json={"name": name, "bytes": size})
    assert response.status_code >= 400
    assert said in response.json()["error"]["message"]
    assert response.json()["error"]["hint"]
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


def test_two_uploads_of_one_name_become_two_files(client: TestClient) -> None:
    ids = [begin(client, "a.jsonl", 2)["id"] for _ in range(2)]
    assert [part(client, id, 0, b"{}")["name"] for id in ids] == ["data/a.jsonl", "data/a-2.jsonl"]


def test_parts_out_of_order_or_too_many_are_refused(client: TestClient) -> None:
    id = begin(client, "a.jsonl", 10)["id"]
    part(client, id, 0, b"12345")
    assert "not the next" in part(client, id, 0, b"12345", 400)["error"]["message"]
    assert part(client, id, 5, b"123456", 413)["error"]["code"] == "too-large"
    assert part(client, id, 5, b"12345")["name"] == "data/a.jsonl"
    assert part(client, id, 10, b"1", 404)["error"]["code"] == "not-found"


def test_an_abandoned_upload_makes_room_for_others(
    client: TestClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for _ in range(uploads.MAX_OPEN):
        begin(client, "a.jsonl", 10)
    assert begin(client, "a.jsonl", 10, 429)["error"]["code"] == "busy"
    monkeypatch.setattr(uploads, "_IDLE_SECONDS", -1.0)
    begin(client, "a.jsonl", 10)
    assert len(list((tmp_path / "data").iterdir())) == 1


def test_uploads_are_not_promised_the_same_free_space(
    client: TestClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    free = SimpleNamespace(free=uploads._SPARE_BYTES + 100)
    monkeypatch.setattr(uploads.shutil, "disk_usage", lambda folder: free)
    first = begin(client, "a.jsonl", 70)["id"]
    refused = begin(client, "b.jsonl", 31, 507)["error"]
    assert (refused["code"], "room for 30 B" in refused["message"]) == ("disk-full", True)
    second = begin(client, "b.jsonl", 30)["id"]
    begin(client, "c.jsonl", 1, 507)
    part(client, first, 0, b"x" * 60)
    free.free -= 60  # the bytes are on the disk now
    begin(client, "c.jsonl", 1, 507)
    part(client, second, 0, b"x" * 30)
    part(client, first, 60, b"x" * 10)
    free.free = uploads._SPARE_BYTES + 9
    begin(client, "c.jsonl", 9)


def test_a_viewer_uploads_nothing(tmp_path: Path) -> None:
    stranger = webui_client(tmp_path, login=False)
    assert stranger.post("/api/v1/data/uploads", json={"name": "a.jsonl", "bytes": 9}).status_code == 401
    assert stranger.put("/api/v1/data/uploads/x?offset=0", content=b"x").status_code == 401


def test_goals_name_algorithms_and_the_rows_that_they_read(client: TestClient) -> None:
    found = client.get("/api/v1/train/choices").json()
    goals = {goal["name"]: goal for goal in found["goals"]}
    assert list(goals) == ["answers", "style", "preferences", "tools", "reward"]
    assert goals["preferences"]["algorithms"] == [
        {"name": "dpo", "rows": "preference"},
        {"name": "kto", "rows": "unpaired"},
    ]
    assert goals["reward"]["graded"]
    assert "exact" in found["graders"]
    assert "regex" not in found["graders"], "it needs a pattern"
    assert found["models"][0]["id"] == "gym-nano"


def test_a_name_that_is_free_is_suggested(client: TestClient, tmp_path: Path) -> None:
    assert client.get("/api/v1/train/choices").json()["free"] == "runs/my-run"
    for name in ("my-run", "my-run-2"):
        (tmp_path / "runs" / name).mkdir()
    assert client.get("/api/v1/train/choices").json()["free"] == "runs/my-run-3"
    text = "model: gym-nano\noutput_dir: runs/my-run-2\n"
    assert client.post("/api/v1/train/check", json={"text": text}).json()["free"] == "runs/my-run-3"


def test_rows_that_the_goal_cannot_use_are_a_problem_of_their_line(
    client: TestClient, tmp_path: Path
) -> None:
    (tmp_path / "mine.jsonl").write_bytes(ROWS)
    text = "algorithm: dpo\nmodel: gym-nano\noutput_dir: runs/x\ndata:\n  - path: mine.jsonl\n"
    (problem,) = client.post("/api/v1/train/check", json={"text": text}).json()["problems"]
    assert (problem["line"], problem["key"]) == (5, "data.0.path")
    assert "chosen and rejected" in f"{problem['message']} {problem['hint']}"
    sft = text.replace("dpo", "sft")
    assert client.post("/api/v1/train/check", json={"text": sft}).json()["problems"] == []


def test_an_adapter_is_not_the_model_of_another_adapter(client: TestClient, tmp_path: Path) -> None:
    (tmp_path / "mine.jsonl").write_bytes(ROWS)
    (tmp_path / "tuned").mkdir()
    (tmp_path / "tuned" / "adapter_config.json").write_text('{"base_model_name_or_path": "gym-nano"}')
    text = f"model: {tmp_path}/tuned\noutput_dir: runs/x\ndata:\n  - path: mine.jsonl\nfinetuning: "

    def problems(method: str) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = client.post("/api/v1/train/check", json={"text": text + method}).json()[
            "problems"
        ]
        return found

    assert [(one["line"], one["key"]) for one in problems("lora")] == [(1, "model")]
    assert f"adapter: {tmp_path}/tuned" in problems("lora")[0]["hint"]
    offered = {one["id"]: one["base"] for one in client.get("/api/v1/train/choices").json()["models"]}
    assert offered == {"gym-nano": None, "tuned": "gym-nano"}
    assert problems("full") == []


@pytest.mark.slow  # starts a process with torch
def test_the_memory_of_a_model_is_that_of_its_plan(client: TestClient, tmp_path: Path) -> None:
    (tmp_path / "mine.jsonl").write_bytes(ROWS)
    text = "model: gym-nano\noutput_dir: runs/x\ndata:\n  - path: mine.jsonl\nmax_steps: 4\n"
    found = {
        name: value
        for model in ("gym-nano", "./none")
        for name, value in client.post("/api/v1/train/memory", json={"text": text, "models": [model]})
        .json()
        .items()
    }
    plan = client.post("/api/v1/train/plan", json={"text": text}).json()
    assert found["gym-nano"]["peak_bytes"] == plan["peak_bytes"]
    assert plan["by_rows"].keys() == set(ROW_KEYS)
    assert plan["by_rows"]["per_device_train_batch_size"] >= 1
    assert "no such folder" in found["./none"]["problem"]


def test_a_shorter_run_is_planned_without_timing_the_model_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from gym_fed.training.planning.plan import BlockTiming
    from gym_fed.webui import plan_views

    timed: list[str] = []

    def calibrate(config: Any, sizes: Any, device: Any) -> BlockTiming:
        timed.append(config.finetuning)
        return BlockTiming(block=1e-4, rest=1e-4, update=0.0, length=8)

    monkeypatch.setattr(plan_views, "calibrate", calibrate)
    (tmp_path / "mine.jsonl").write_bytes(ROWS)
    text = f"model: gym-nano\ndata:\n  - path: {tmp_path}/mine.jsonl\n"
    views = plan_views.PlanViews(tmp_path)

    def plan(more: str, *, timed: bool = True) -> dict[str, Any]:
        return views.answer({"view": "plan", "text": text + more, "timed": timed})

    assert plan("max_steps: 8\n", timed=False)["seconds_per_step"] is None
    assert timed == []
    long, short = plan("max_steps: 8\noutput_dir: runs/a\n"), plan("max_steps: 4\noutput_dir: runs/b\n")
    assert (long["steps"], short["steps"], timed) == (8, 4, ["full"])
    assert long["seconds_per_step"] == short["seconds_per_step"] > 0
    plan("max_steps: 4\nfinetuning: lora\n")
    assert timed == ["full", "lora"]
