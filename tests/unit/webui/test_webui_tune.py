"""The screen ``tune``: searches with their trials, the text that starts one with its problems, and its resume."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

from gym_fed.training.run.folder import FolderLock
from tests.support.webui_client import webui_client

pytestmark = pytest.mark.usefixtures("warm_children")

TEXT = """model: gym-nano
output_dir: runs/found
data: [{tasks: [double], num_examples: 8}]
eval_data: [{tasks: [double], num_examples: 4, seed: 1}]
max_steps: 2
search:
  num_trials: 3
  parameters:
    learning_rate: {low: 1.0e-4, high: 1.0e-1, log: true}
    lora.r: {choices: [2, 4]}
"""


def trial(number: int, state: str, value: float | None, why: str = "") -> dict[str, Any]:
    """A line of ``trials.json``."""
    parameters = {"learning_rate": 0.01, "lora.r": 2}
    return {
        "number": number,
        "parameters": parameters,
        "state": state,
        "value": value,
        "folder": f"trial-{number:04d}",
        "why": why,
    }


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    search = tmp_path / "runs" / "tried"
    (search / "trials" / "trial-0003").mkdir(parents=True)
    (search / "search.yaml").write_text(TEXT)
    trials = [
        trial(0, "complete", 2.0),
        trial(1, "pruned", None, "<b>pruned</b> at step 1 of 2"),
        trial(2, "complete", 1.5),
    ]
    (search / "trials.json").write_text(json.dumps(trials))
    (search / "best.yaml").write_text("# trial 2\nmodel: gym-nano\n")
    return tmp_path


@pytest.fixture
def client(folder: Path) -> TestClient:
    return webui_client(folder)


def get(client: TestClient, path: str, /, **query: Any) -> Any:
    response = client.get(f"/api/v1/{path}", params=query)
    assert response.status_code == 200, response.text
    return response.json()


def test_a_search_with_pipes_and_other_types_in_its_files_holds_up_no_page(
    client: TestClient, folder: Path
) -> None:
    other = folder / "runs" / "other"
    other.mkdir()
    for name in ("search.yaml", "best.yaml"):
        os.mkfifo(other / name)
    strange = trial(0, "complete", 2.0) | {"folder": ["a"], "state": {"a": 1}, "parameters": 7}
    (folder / "runs" / "tried" / "trials.json").write_text(json.dumps([strange]))
    assert {one["path"] for one in get(client, "tune")["searches"]} == {"tried", "other"}
    assert get(client, "tune/search", path="tried")["unfinished"] == ["trial-0003"]


def test_a_link_in_a_search_shows_nothing_of_another_folder(client: TestClient, folder: Path) -> None:
    (folder / "private").write_text("token-of-the-operator")
    best = folder / "runs" / "tried" / "best.yaml"
    best.unlink()
    best.symlink_to(folder / "private")
    assert get(client, "tune/search", path="tried")["best_text"] == ""


def test_searches_are_listed_with_their_best_trial(client: TestClient) -> None:
    [found] = get(client, "tune")["searches"]
    assert (found["path"], found["ended"], found["complete"], found["wanted"]) == ("tried", 3, 2, 3)
    assert (found["best"]["number"], found["metric"], found["is_running"]) == (2, "eval_loss", False)


def test_the_best_trial_of_a_search_that_maximizes_has_the_largest_figure(
    client: TestClient, folder: Path
) -> None:
    (folder / "runs" / "tried" / "search.yaml").write_text(
        TEXT.replace("search:", "search:\n  direction: maximize")
    )
    [found] = get(client, "tune")["searches"]
    assert (found["best"]["number"], found["direction"]) == (0, "maximize")


def test_a_search_at_work_is_not_started_again(client: TestClient, folder: Path) -> None:
    lock = FolderLock(folder / "runs" / "tried")
    assert get(client, "tune")["searches"][0]["is_running"]
    refused = client.post("/api/v1/tune/resume", json={"path": "tried"})
    lock.release()
    assert (refused.status_code, refused.json()["error"]["code"]) == (409, "state-locked")


def test_a_search_has_its_trials_and_best_config(client: TestClient) -> None:
    found = get(client, "tune/search", path="tried")
    assert [one["state"] for one in found["trials"]] == ["complete", "pruned", "complete"]
    assert found["trials"][1]["why"] == "<b>pruned</b> at step 1 of 2"
    assert found["unfinished"] == ["trial-0003"]
    assert found["best_text"].startswith("# trial 2")
    assert found["parameters"]["lora.r"] == {"choices": [2, 4]}


@pytest.mark.parametrize("text", ["", "[", "{}", '[{"number": 1}]', "[" * 100_000])
def test_broken_trials_hide_no_search(client: TestClient, folder: Path, text: str) -> None:
    (folder / "runs/tried/trials.json").write_text(text)
    assert get(client, "tune/search", path="tried")["trials"] == []


@pytest.mark.parametrize(("path", "status"), [("../..", 403), ("/etc", 403), ("none", 404)])
def test_what_is_no_search_is_refused(client: TestClient, path: str, status: int) -> None:
    assert client.get("/api/v1/tune/search", params={"path": path}).status_code == status
    assert client.post("/api/v1/tune/resume", json={"path": path}).status_code == status


def test_a_text_is_checked_as_the_command_reads_it(client: TestClient) -> None:
    def check(text: str) -> Any:
        return client.post("/api/v1/tune/check", json={"text": text}).json()

    good = check(TEXT)
    assert (good["problems"], good["path"], good["exists"]) == ([], "found", False)
    assert good["search"]["parameters"]["learning_rate"]["log"] is True
    [problem] = check(TEXT.replace("low: 1.0e-4", "low: 0"))["problems"]
    assert problem["line"] == 9
    assert "log needs low above 0" in problem["message"]
    [outside] = check(TEXT.replace("runs/found", "../found"))["problems"]
    assert "is not below" in outside["message"]
    assert check(TEXT.partition("search:")[0])["problems"]


def test_a_search_starts_and_resumes_as_a_job(client: TestClient, folder: Path) -> None:
    viewer = webui_client(folder, login=False)
    assert viewer.post("/api/v1/tune/start", json={"text": TEXT}).status_code == 401
    started = client.post("/api/v1/tune/start", json={"text": TEXT}).json()
    try:
        assert started["job"]["command"][:2] == ["gym", "tune"]
        assert (folder / started["job"]["command"][2]).read_text() == TEXT
        assert client.post("/api/v1/tune/start", json={"text": TEXT}).status_code in (409, 423)
    finally:
        client.post(f"/api/v1/jobs/{started['job']['id']}/stop")
    resumed = client.post("/api/v1/tune/resume", json={"path": "tried"}).json()
    client.post(f"/api/v1/jobs/{resumed['job']['id']}/stop")
    assert resumed["job"]["command"] == ["gym", "tune", "runs/tried/search.yaml"]


def test_the_form_is_the_schema(client: TestClient) -> None:
    found = get(client, "tune")["form"]
    settings = {field["key"]: field for field in found["settings"]}
    assert settings["sampler"]["choices"] == ["tpe", "random"]
    assert settings["pruner.name"]["default"] == "median"
    assert {"key": "learning_rate", "kind": "number"} in found["keys"]
    assert "lora.r" in {field["key"] for field in found["keys"]}
