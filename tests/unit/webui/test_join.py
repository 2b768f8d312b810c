"""The routes of `join`: which command becomes a job, how a question is answered, and that no secret is shown."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
from gym_client.web import contribute
from starlette.testclient import TestClient

from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.web import jobs as web_jobs
from gym_fed.web.jobs import Jobs, WebJob
from tests.support.webui_client import webui_client

API = "/api/v1/join"
TERMS = f"offer:{'a' * 32}"
INVITE = "the-secret-token"


class FakeJobs:
    """Takes the place of ``Jobs`` as the pages' routes see it."""

    def __init__(self) -> None:
        self.jobs: list[WebJob] = []
        self.environments: list[dict[str, str]] = []

    def start(self, command: list[str], *, title: str, env: dict[str, str] | None = None) -> WebJob:
        self.environments.append(dict(env or {}))
        self.jobs.insert(0, WebJob(f"job-{len(self.jobs)}", title, command, "", 1, 0.0, 0.0))
        return self.jobs[0]

    def end(self) -> None:
        self.jobs = [WebJob(**{**job.facts(), "status": "ended", "exit_code": 2}) for job in self.jobs]

    def get(self, id: str) -> WebJob:
        for job in self.jobs:
            if job.id == id:
                return job
        raise GymError(ErrorCode.NOT_FOUND, f"there is no job {id}")


@pytest.fixture
def jobs(monkeypatch: pytest.MonkeyPatch) -> FakeJobs:
    fake = FakeJobs()
    monkeypatch.setattr(Jobs, "start", lambda self, *words, **more: fake.start(*words, **more))
    monkeypatch.setattr(Jobs, "get", lambda self, id: fake.get(id))
    monkeypatch.setattr(Jobs, "list", lambda self: fake.jobs)
    return fake


@pytest.fixture
def client(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, jobs: FakeJobs) -> TestClient:
    monkeypatch.setenv("GYM_HOME", str(tmp_path / "home"))
    (tmp_path / "my.jsonl").write_text("{}\n")
    return webui_client(tmp_path)


def test_an_answer_accepts_what_was_shown_and_keeps_what_was_accepted(
    client: TestClient, jobs: FakeJobs
) -> None:
    given = {
        "server": "hub:9443",
        "invite": INVITE,
        "data": "my.jsonl",
        "rounds": 2,
        "name": "--yes",
        "columns": "prompt=q",
    }
    begun = client.post(API, json=given).json()
    first = [
        *[
            "gym-client",
            "join",
            "--json",
            "--no-wait",
            "--server=hub:9443",
            "--data=my.jsonl",
            "--columns=prompt=q",
            "--name=--yes",
            "--rounds=2",
        ]
    ]
    assert begun["command"] == first
    jobs.end()
    key = f"sha256:{'b' * 64}"
    client.post(f"{API}/answer", json={"job": begun["id"], "fingerprint": key, "invite": INVITE})
    jobs.end()
    for terms in (f"offer:{'0' * 32}", TERMS):  # the hub has changed its terms meanwhile
        answered = client.post(
            f"{API}/answer", json={"job": jobs.jobs[0].id, "accept": terms, "invite": INVITE}
        )
        jobs.end()
    last = [word for word in first if word != "--no-wait"]
    assert answered.json()["command"] == [*last, f"--fingerprint={key}", f"--accept={TERMS}"]
    assert jobs.environments == [{"GYM_INVITE": INVITE}] * 4
    assert "the-secret-token" not in json.dumps([job.facts() for job in jobs.jobs])


@pytest.mark.parametrize(
    ("change", "status"),
    [
        ({"server": "hub; rm"}, 400),
        ({"data": "../x"}, 403),
        ({"data": "/etc/passwd"}, 403),
        ({"data": "missing"}, 404),
        ({"rounds": 0}, 400),
        ({"passphrase": "x"}, 400),
    ],
    ids=str,
)
def test_what_a_join_may_not_be_given_is_refused(
    client: TestClient, jobs: FakeJobs, change: dict[str, Any], status: int
) -> None:
    assert client.post(API, json={"server": "hub", **change}).status_code == status
    assert not jobs.jobs


@pytest.mark.parametrize(
    "answer", [{"accept": "--yes"}, {"accept": "offer:x"}, {"fingerprint": "sha256:1"}], ids=str
)
def test_only_an_answer_of_known_form_is_passed_on(
    client: TestClient, jobs: FakeJobs, answer: dict[str, Any]
) -> None:
    begun = client.post(API, json={"server": "hub"}).json()
    jobs.end()
    assert client.post(f"{API}/answer", json={"job": begun["id"], **answer}).status_code == 400
    assert len(jobs.jobs) == 1


def test_another_command_s_job_is_not_continued_as_a_join(client: TestClient, jobs: FakeJobs) -> None:
    job = jobs.start(["gym", "train", "x.yaml"], title="Train")
    assert client.post(f"{API}/answer", json={"job": job.id, "accept": TERMS}).status_code == 400
    assert client.post(f"{API}/answer", json={"job": "none", "accept": TERMS}).status_code == 404


def test_a_second_join_waits_for_the_end_of_the_first(client: TestClient) -> None:
    assert client.post(API, json={"server": "hub"}).status_code == 200
    assert client.post(API, json={"server": "other"}).status_code == 409


def test_receipts_are_shown_without_proofs_and_the_key_never(client: TestClient, tmp_path: Path) -> None:
    body = {"server_round": 1, "verdict": "merged", "update": "f0", "at": 5, "reason": "", "record": {}}
    entry = {"sequence": 3, "kind": "verdict", "body": body}
    lines = [{"server": "s1", "proof": {"entry": entry}}, {"proof": []}, {"proof": {"entry": {"body": 1}}}]
    (tmp_path / "home").mkdir(exist_ok=True)
    (tmp_path / "home" / "receipts.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    found = client.get(API).json()
    assert found["num_receipts"] == 3
    assert found["receipts"][-1] == {
        **{"server": "s1", "sequence": 3, "kind": "verdict"},
        **{key: body[key] for key in ("server_round", "verdict", "update", "reason", "at")},
    }
    assert found["hubs"] == []
    assert "PRIVATE" not in json.dumps(found)


def test_an_account_is_what_gym_client_status_prints(
    client: TestClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended = subprocess.CompletedProcess([], 0, json.dumps({"balance": 7}), "")
    monkeypatch.setattr(web_jobs, "run_process", lambda *words, **more: ended)
    unknown = client.get(f"{API}/account", params={"server": "hub:1"})
    assert unknown.status_code == 404, "no page has this machine call an address of its choice"
    monkeypatch.setattr(contribute, "_require_known", lambda home, server: None)
    assert client.get(f"{API}/account", params={"server": "hub:1"}).json() == {"balance": 7}
    ended.returncode, ended.stderr = 60, GymError(ErrorCode.UNAUTHENTICATED, "unknown").to_json_line()
    refused = client.get(f"{API}/account", params={"server": "hub:1"})
    assert (refused.status_code, "unknown" in refused.text) == (503, True)
    assert client.get(f"{API}/account", params={"server": "a b"}).status_code == 400


def test_nobody_joins_or_leaves_for_a_page_of_another_site(client: TestClient, jobs: FakeJobs) -> None:
    del client.headers["X-CSRF-Token"]
    for path, body in (("", {}), ("/answer", {"job": "x"}), ("/leave", {"server": "hub"})):
        assert client.post(f"{API}{path}", json=body).status_code == 403
    assert not jobs.jobs
