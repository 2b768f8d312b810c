"""The screen ``train``: checks with line and column, edits in place, and real runs that stop and go on."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

from tests.support.webui_client import webui_client

pytestmark = pytest.mark.usefixtures("warm_children")

NANO = """\
algorithm: sft
model: gym-nano
output_dir: runs/{name}
data:
  - {{tasks: [double], num_examples: 40}}
max_steps: {steps}
per_device_train_batch_size: 2
max_length: 64
logging_steps: 2
num_threads: 1
"""


@pytest.fixture
def client(tmp_path: Path) -> TestClient:
    return webui_client(tmp_path)


def post(client: TestClient, path: str, status: int = 200, **body: Any) -> Any:
    response = client.post(f"/api/v1/{path}", json=body)
    assert response.status_code == status, response.text
    return response.json()


def check(client: TestClient, text: str) -> Any:
    return post(client, "train/check", text=text)


def test_a_valid_text_says_where_the_run_will_be_and_that_nothing_leaves(client: TestClient) -> None:
    found = check(client, NANO.format(name="x", steps=4))
    assert (found["problems"], found["path"], found["taken"], found["leaves"]) == ([], "x", "", [])
    assert found["given"]["max_steps"] == 4


@pytest.mark.parametrize(
    ("before", "after", "problem"),
    [
        ("max_steps: 4", "max_stepz: 4", (6, 1, "max_stepz", "unknown key (did you mean 'max_steps'?)")),
        ("max_steps: 4", "max_steps: many", (6, 1, "max_steps", "Input should be a valid integer")),
        ("num_examples: 40", "num_examples: 0", (5, 23, "data.0.num_examples", "Input should be greater")),
        ("max_steps: 4", "max_steps: [", (7, 28, "", "not valid YAML")),
        ("algorithm: sft", "algorithm: sft\nalgorithm: dpo", (2, 1, "algorithm", "given twice")),
        ("runs/x", "elsewhere/x", (3, 1, "output_dir", "is not below")),
        ("runs/x", "runs/../..", (3, 1, "output_dir", "is not below")),
        ("runs/x", "runs/.jobs/x", (3, 1, "output_dir", "is not below")),
        ("runs/x", "runs", (3, 1, "output_dir", "is not below")),
        ("gym-nano", "./nowhere", (2, 1, "model", "no such folder")),
    ],
)
def test_a_problem_has_its_line_and_column(
    client: TestClient, before: str, after: str, problem: tuple[int, int, str, str]
) -> None:
    found = check(client, NANO.format(name="x", steps=4).replace(before, after))
    first = found["problems"][0]
    if "not valid YAML" not in problem[3]:
        assert (first["line"], first["column"]) == problem[:2]
    assert first["key"] == problem[2]
    assert problem[3] in first["message"]
    assert "gym-check" not in json.dumps(found["problems"])


def test_rows_and_models_that_are_missing_are_said_before_the_start(
    client: TestClient, tmp_path: Path
) -> None:
    (tmp_path / "other.jsonl").write_text('{"question": "a", "answer": "b"}\n')
    (tmp_path / "fine.jsonl").write_text('{"prompt": "a", "completion": "b"}\n')
    rows = "{tasks: [double], num_examples: 40}"
    nano = NANO.format(name="x", steps=4)
    unchosen = check(client, "seed: 1")["problems"]
    assert [(one["key"], one["choose"]) for one in unchosen] == [("model", "a model"), ("data", "data")]
    for source, said in {
        "{path: nowhere.jsonl}": "no data file at nowhere.jsonl",
        "{path: other.jsonl}": "no known format has the columns",
        "{path: other.jsonl, columns: {prompt: q}}": "has no column 'q'",
    }.items():
        (problem,) = check(client, nano.replace(rows, source))["problems"]
        assert (problem["line"], problem["column"], problem["key"]) == (5, 6, "data.0.path")
        assert said in problem["message"]
        assert str(tmp_path) not in json.dumps(problem)
        assert "choose" not in problem
        if "no known format" in said:
            assert problem["hint"].endswith('add: columns: {"prompt": "question", "completion": "answer"}')
    for source in (
        "{path: fine.jsonl}",
        "{path: other.jsonl, columns: {prompt: question, completion: answer}}",
        "{path: 'many/*.jsonl'}",
        "{path: /etc/passwd}",
    ):
        assert check(client, nano.replace(rows, source))["problems"] == []


@pytest.mark.parametrize(
    "text", ["", "\x00", "\udcff", "a: &a [*a]", "[" * 5000, "!!python/object:os.system {}"]
)
def test_any_text_is_answered(client: TestClient, text: str) -> None:
    response = client.post("/api/v1/train/check", content=json.dumps({"text": text}))
    assert response.status_code in (200, 400)
    assert response.status_code == 400 or response.json()["problems"]


def test_a_text_that_is_too_long_is_refused(client: TestClient) -> None:
    assert client.post("/api/v1/train/check", json={"text": "#" * 300_000}).status_code == 400


def test_what_leaves_the_machine_is_named(client: TestClient) -> None:
    text = NANO.format(name="x", steps=4).replace("gym-nano", "acme/large")
    text += "tracking: [mlflow]\ntracker: {mode: online, uri: 'http://example.org'}\n"
    text = text.replace("{tasks: [double], num_examples: 40}", "{hub: acme/rows}")
    found = check(client, text)
    assert found["missing"] == ["acme/large"]
    said = " ".join(found["leaves"])
    assert all(word in said for word in ("mlflow at http://example.org", "acme/large", "acme/rows"))


def test_a_missing_model_needs_agreement_before_the_start(client: TestClient) -> None:
    text = NANO.format(name="x", steps=4).replace("gym-nano", "acme/large")
    error = post(client, "train/start", 404, text=text)["error"]
    assert (error["code"], error["hint"]) == ("model-not-found", "agree to the download first")


def test_notes_on_words_of_other_platforms_are_shown(client: TestClient) -> None:
    found = check(client, NANO.format(name="x", steps=4) + "use_unsloth: false\n")
    assert any(
        "unsloth" in note for note in [*found["notes"], *(one["message"] for one in found["problems"])]
    )


def test_every_recipe_is_offered_and_its_rows_are_found(client: TestClient) -> None:
    listed = client.get("/api/v1/train/choices").json()["recipes"]
    assert {"nano-sft", "nano-grpo"} <= {recipe["name"] for recipe in listed}
    for name in ("nano-sft", "nano-dpo"):
        text = client.get(f"/api/v1/train/recipes/{name}").json()["text"]
        assert check(client, text)["problems"] == []
    assert client.get("/api/v1/train/recipes/%2e%2e%2fx").status_code == 404


def test_the_form_has_every_key_with_its_help_and_edits_the_text(client: TestClient) -> None:
    form = client.get("/api/v1/train/form").json()
    fields = {field["key"]: field for group in form["groups"] for field in group["fields"]}
    assert set(form["first"]) <= set(fields)
    assert (fields["lora.r"]["kind"], fields["lora.r"]["section"], fields["lora.r"]["least"]) == (
        "integer",
        "lora",
        1,
    )
    assert fields["max_steps"]["help"].startswith("Number of optimiser steps")
    assert "dpo" in fields["algorithm"]["choices"]
    text = NANO.format(name="x", steps=4)
    edited = post(client, "train/edit", text=text, values={"lora.r": 4})["text"]
    assert edited == text + "lora:\n  r: 4\n"
    assert (
        post(client, "train/edit", 400, text=text, values={"data.x": 4})["error"]["hint"]
        == "edit the YAML text"
    )
    assert client.post("/api/v1/train/edit", json={"text": text, "values": {"a b": 1}}).status_code == 400


def wait(client: TestClient, path: str, status: str, seconds: float = 240.0) -> Any:
    """The run, once its status is so."""
    end = time.monotonic() + seconds
    while (found := client.get(f"/api/v1/runs/{path}").json()).get("status") != status:
        if (job := found["job"])["status"] != "running" or time.monotonic() > end:
            raise AssertionError(found["status"], job, client.get(f"/api/v1/jobs/{job['id']}/output").text)
        time.sleep(0.1)
    return found


def finished_losses(client: TestClient, name: str) -> list[Any]:
    return list(wait(client, name, "finished")["series"]["loss"])


@pytest.mark.slow  # three whole runs; test_train.py resumes one in the quick suite
def test_a_run_that_is_stopped_leaves_a_checkpoint_and_goes_on_to_the_same_loss(
    client: TestClient, tmp_path: Path
) -> None:
    started = post(client, "train/start", text=NANO.format(name="cut", steps=40))
    assert started["path"] == "cut"
    assert (tmp_path / started["job"]["command"][2]).read_text() == NANO.format(name="cut", steps=40)
    end = time.monotonic() + 120
    while not client.get("/api/v1/runs/cut").json()["series"].get("loss"):
        assert time.monotonic() < end, client.get(f"/api/v1/jobs/{started['job']['id']}/output").text
        time.sleep(0.05)
    assert (
        post(client, "train/start", 409, text=NANO.format(name="cut", steps=40))["error"]["code"]
        == "state-locked"
    )
    assert post(client, "runs/cut/stop")["job"]["stops"] == 1
    stopped = wait(client, "cut", "unfinished")
    assert 0 < stopped["steps"] < 40
    assert list((tmp_path / "runs" / "cut" / "checkpoints").glob("checkpoint-*"))
    again = webui_client(tmp_path)  # another workbench, to which the run is a folder
    resumed = post(again, "runs/cut/resume")
    assert resumed["command"][:2] == ["gym", "train"]
    post(again, "train/start", text=NANO.format(name="whole", steps=40))
    assert finished_losses(again, "cut") == finished_losses(again, "whole")
    error = post(again, "train/start", 409, text=NANO.format(name="cut", steps=40))["error"]
    assert error["code"] == "file-exists"
    assert {job["status"] for job in again.get("/api/v1/jobs").json()["jobs"]} <= {"ended", "running"}


@pytest.mark.slow  # times blocks of a model in a process
def test_an_estimate_is_made_by_a_process_of_its_own_and_reports_its_error(client: TestClient) -> None:
    found = post(client, "train/plan", text=NANO.format(name="x", steps=4))
    assert (found["steps"], found["peak_bytes"] > 0) == (4, True)
    error = post(client, "train/plan", 422, text="algorithm: sft\nmodle: gym-nano\n")["error"]
    assert error["message"].startswith("config.yaml:2:1: modle: unknown key")


@pytest.mark.parametrize(
    "name", ["x" * 300 + ".jsonl", "x/" * 3000 + "x.jsonl", "circle.jsonl", "digits.jsonl", "digits.json"]
)
def test_names_and_rows_that_no_program_takes_are_no_failure_of_the_server(
    client: TestClient, tmp_path: Path, name: str
) -> None:
    (tmp_path / "circle.jsonl").symlink_to(tmp_path / "circle.jsonl")
    row = '{"n": ' + "9" * 5000 + "}"
    (tmp_path / "digits.jsonl").write_text(row)
    (tmp_path / "digits.json").write_text(f"[{row}]")
    found = check(
        client, NANO.format(name="x", steps=4).replace("tasks: [double], num_examples: 40", f"path: {name}")
    )
    assert [one["key"] for one in found["problems"]] == (["data.0.path"] if "digits" in name else [])
    assert client.get(f"/api/v1/runs/{name[:1000]}").status_code in (403, 404)
    if "digits" not in name:
        params = {"name": name[:1000]}
        assert client.get("/api/v1/data/rows", params=params).status_code in (403, 404)
    found = check(client, NANO.format(name=name, steps=4))
    assert found["path"] in ("", name)
