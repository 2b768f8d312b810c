"""The routes of `models`: what is listed, which commands become jobs, and when a rename or deletion is refused."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from starlette.testclient import TestClient

from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.training.run.folder import FolderLock
from gym_fed.web import jobs
from gym_fed.web.jobs import Jobs
from gym_fed.webui import models
from tests.support.nano_store import nano_store
from tests.support.webui_client import webui_client

pytestmark = pytest.mark.usefixtures("warm_children")

API = "/api/v1/models"
HOSTILE = "<img src=x onerror=alert(1)>"


@pytest.fixture
def client(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> TestClient:
    monkeypatch.setenv("GYM_HOME", str(tmp_path / "home"))
    for name in ("tuned", HOSTILE):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text("{}")
    (tmp_path / "tuned" / "README.md").write_text("---\nlicense: apache-2.0\n---\n")
    (tmp_path / "lora").mkdir()
    adapter = {"base_model_name_or_path": str(tmp_path / "tuned")}
    (tmp_path / "lora" / "adapter_config.json").write_text(json.dumps(adapter))
    return webui_client(tmp_path)


@pytest.fixture
def begun(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    commands: list[list[str]] = []

    def start(jobs: Jobs, command: list[str], *, title: str) -> Any:
        commands.append(command)
        return SimpleNamespace(facts=lambda: {"id": "1", "title": title})

    monkeypatch.setattr(Jobs, "start", start)
    return commands


def do(client: TestClient, **action: Any) -> Any:
    return client.post(f"{API}/do", json={"do": action})


def test_models_are_listed_with_size_and_licence(client: TestClient) -> None:
    found = {one["id"]: one for one in client.get(API).json()["models"]}
    assert found["tuned"]["licence"] == "apache-2.0"
    assert found[HOSTILE]["licence"] == ""
    assert found["gym-nano"]["bytes"] > 10**6


def test_formats_say_what_they_need(client: TestClient) -> None:
    kinds = client.get(f"{API}/kinds").json()
    formats = {row["format"]: row for row in kinds["formats"]}
    assert formats["gguf"]["suffix"] == ".gguf"
    assert kinds["codecs"][0] == "compact"
    assert "bitdelta" in kinds["codecs"]
    assert {"ties", "trimmed_mean"} <= set(kinds["rules"])


@pytest.mark.parametrize(
    ("action", "words"),
    [
        (
            {
                "action": "export",
                "model": HOSTILE,
                "format": "gguf",
                "quantization": "q8_0",
                "output": "out.gguf",
            },
            ["gym", "export", "--format=gguf", "--quantization=q8_0", "--output=out.gguf", "--", HOSTILE],
        ),
        (
            {"action": "encode", "base": "gym-nano", "tuned": "tuned", "output": "a/b.gymdelta"},
            [
                "gym",
                "delta",
                "encode",
                "--output=a/b.gymdelta",
                "--codec=compact",
                "--",
                "gym-nano",
                "tuned",
            ],
        ),
        (
            {
                "action": "merge",
                "base": "gym-nano",
                "updates": ["tuned", "lora"],
                "rule": "ties",
                "output": "s",
            },
            ["gym", "soup", "merge", "--rule=ties", "--base=gym-nano", "--output=s", "--", "tuned", "lora"],
        ),
        (
            {"action": "share", "model": "tuned", "output": "me/tuned", "licence": "Apache-2.0"},
            ["gym", "models", "push", "--licence=Apache-2.0", "--", "me/tuned", "tuned"],
        ),
    ],
    ids=["export", "encode", "merge", "share"],
)
def test_an_action_is_the_job_that_was_shown(
    client: TestClient, begun: list[list[str]], action: dict[str, Any], words: list[str]
) -> None:
    shown = client.post(f"{API}/do", json={"do": action, "preview": True}).json()
    assert shown["job"] is None
    assert not begun
    assert do(client, **action).json()["command"] == shown["command"]
    assert begun == [words]


@pytest.mark.parametrize(
    ("change", "status"),
    [
        ({"model": "/etc"}, 404),
        ({"model": "--help"}, 404),
        ({"format": "nothing"}, 400),
        ({"output": "../out"}, 403),
        ({"output": "/tmp/out"}, 403),
        ({"output": "tuned"}, 409),
        ({"output": "."}, 409),
        ({"variant": "../x"}, 400),
        ({"quantization": "--yes"}, 400),
    ],
    ids=str,
)
def test_what_an_action_may_not_name_is_refused(
    client: TestClient, begun: list[list[str]], change: dict[str, Any], status: int
) -> None:
    action = {"action": "export", "model": "tuned", "format": "gguf", "output": "out.gguf", **change}
    assert do(client, **action).status_code == status
    assert not begun


def test_a_model_is_renamed_and_deleted_once_its_dependents_are_confirmed(
    client: TestClient, tmp_path: Path
) -> None:
    assert client.get(f"{API}/one", params={"model": "lora"}).json()["base"] == "tuned"
    assert client.get(f"{API}/one", params={"model": "tuned"}).json() == {
        "base": None,
        "uses": [],
        "dependents": ["adapter lora"],
    }
    refused = client.post(f"{API}/delete", json={"model": "tuned"})
    assert "adapter lora" in refused.json()["error"]["message"]
    for bad in ("../x", "a/b", ".hidden", "-x", HOSTILE):
        answer = client.post(f"{API}/rename", json={"model": "lora", "to": bad})
        assert answer.status_code == (409 if bad == HOSTILE else 400)
    renamed = client.post(f"{API}/rename", json={"model": "tuned", "to": "better", "confirmed": True})
    assert renamed.json() == {"model": "better"}
    assert client.post(f"{API}/delete", json={"model": "better"}).status_code == 200
    assert not (tmp_path / "better").exists()
    assert client.post(f"{API}/delete", json={"model": "gym-nano"}).status_code == 403
    assert client.post(f"{API}/delete", json={"model": "../home"}).status_code == 404


def test_a_model_in_use_is_neither_renamed_nor_deleted(
    client: TestClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lock = FolderLock(tmp_path / "tuned")
    refused = client.post(f"{API}/delete", json={"model": "tuned", "confirmed": True})
    assert (refused.status_code, "trains" in refused.text) == (409, True)
    lock.release()
    job = SimpleNamespace(status="running", title="Export", command=["gym", "export", "--", "./tuned"])
    monkeypatch.setattr(Jobs, "list", lambda jobs: [job])
    refused = client.post(f"{API}/rename", json={"model": "tuned", "to": "other", "confirmed": True})
    assert (refused.status_code, "Export" in refused.text) == (409, True)
    job.status = "ended"
    served = SimpleNamespace(facts=lambda: [{"base": "tuned"}])
    monkeypatch.setattr(models, "servers_of", lambda workbench: served)
    assert (
        "play has loaded it" in client.post(f"{API}/delete", json={"model": "tuned", "confirmed": True}).text
    )
    assert (tmp_path / "tuned").is_dir()


def test_a_variant_is_deleted_by_its_name(client: TestClient, tmp_path: Path) -> None:
    nano_store(tmp_path / "home" / "variants", ["ann", "bob"])
    assert client.post(f"{API}/delete-variant", json={"name": "ann"}).status_code == 200
    assert [one["name"] for one in client.get(API).json()["variants"]] == ["bob"]
    assert client.post(f"{API}/delete-variant", json={"name": "ann"}).status_code == 404


def test_the_registry_s_rows_come_from_a_process_that_may_fail(
    client: TestClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [{"name": "a", "where": "registry"}, {"name": "b", "where": "cache"}]
    done = subprocess.CompletedProcess([], 0, json.dumps(rows))
    monkeypatch.setattr(jobs, "run_process", lambda *a, **k: done)
    assert client.get(f"{API}/registry").json() == {"models": rows[:1]}

    said = GymError(ErrorCode.FILE_NOT_FOUND, "no such bucket").to_json_line()

    failed = subprocess.CompletedProcess([], 1, "", f"a warning\n{said}\n")
    monkeypatch.setattr(jobs, "run_process", lambda *a, **k: failed)
    refused = client.get(f"{API}/registry")
    assert (refused.status_code, "no such bucket" in refused.text) == (503, True)


def test_a_page_of_another_site_changes_nothing(client: TestClient, tmp_path: Path) -> None:
    del client.headers["X-CSRF-Token"]
    assert client.post(f"{API}/delete", json={"model": "lora"}).status_code == 403
    assert client.post(f"{API}/delete-variant", json={"name": "ann"}).status_code == 403
    assert do(client, action="export", model="lora", format="gguf", output="o").status_code == 403
    assert (tmp_path / "lora").is_dir()


def test_the_workbenchs_own_folder_is_no_model_to_delete(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "notes.txt").write_text("of a person")
    client = webui_client(tmp_path)
    for confirmed in (False, True):
        body = {"model": str(tmp_path.resolve()), "confirmed": confirmed}
        assert client.post(f"{API}/delete", json=body).status_code == 403
        assert client.post(f"{API}/rename", json={**body, "to": "other"}).status_code == 403
    assert (tmp_path / "notes.txt").exists()


def test_the_registry_is_read_once_at_a_time(tmp_path: Path) -> None:
    client = webui_client(tmp_path)
    with models._one_at_a_time:
        assert client.get(f"{API}/registry").status_code == 429


def test_a_model_whose_files_are_pipes_is_listed_and_read(client: TestClient, tmp_path: Path) -> None:
    for name in ("lora/README.md", "lora/config.yaml", "tuned/config.yaml"):
        os.mkfifo(tmp_path / name)
    assert {"lora", "tuned"} <= {one["id"] for one in client.get(API).json()["models"]}
    assert client.get(f"{API}/one", params={"model": "lora"}).json()["base"] == "tuned"
