"""The newest version's answers: what the config allows, who may see and ask what, and what a failure leaves alone."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from gym_server.federation import Federation
from gym_server.rounds.round_store import RoundStore
from gym_server.rounds.versions import Version
from gym_server.web.dashboard import Dashboard
from gym_server.web.model import MAX_QUESTIONS, QuestionLimit
from gym_server.web.newest_answers import MAX_CHARACTERS
from gym_server.web.newest_model import FOLDER_NAME, NewestModel
from pydantic import ValidationError

from gym_fed.config.hub.sections import DashboardConfig
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.web.access import CSRF_HEADER
from tests.support.fake_model import FakeModel
from tests.support.hub_pages import HubPages
from tests.support.loopback_hub import LoopbackHub
from tests.support.wait import until

HOSTILE = "<script>alert(1)</script>"
PROMPTS = ["What is a soup?", HOSTILE]
Opened = Callable[..., tuple[HubPages, NewestModel]]


@pytest.fixture
def model(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeModel]:
    found = FakeModel(monkeypatch)
    yield found
    found.close()


@pytest.fixture
def head(monkeypatch: pytest.MonkeyPatch) -> list[Version]:
    """The newest version is the last of these."""
    versions = [Version(0, "sha256:0")]
    monkeypatch.setattr(RoundStore, "head", lambda store: versions[-1])
    return versions


@pytest.fixture
def opened(tmp_path: Path, head: list[Version]) -> Iterator[Opened]:
    """Opens the pages of a hub that lets its newest version answer."""
    ended: list[Callable[[], None]] = []

    def make(
        prompts: list[str] = PROMPTS, policy: str = "open", is_running: bool = True, ask_by: str = "operators"
    ) -> tuple[HubPages, NewestModel]:
        fed = Federation.open(hub_folder(tmp_path, prompts, policy, ask_by), read_only=not is_running)
        newest = NewestModel(fed.state, fed.live_config, is_running=is_running, changed=lambda: None)
        ended.extend((newest.stop, fed.close))
        newest.start()
        return HubPages(fed, is_running, newest), newest

    yield make
    for end in ended:
        end()


def hub_folder(tmp_path: Path, prompts: list[str], policy: str = "open", ask_by: str = "operators") -> Path:
    """A hub that lets its newest version answer; made once."""
    folder = tmp_path / "hub"
    if not folder.exists():
        dashboard = {"ask": True, "prompts": prompts, "ask_by": ask_by}
        LoopbackHub(folder, dashboard=dashboard, enrolment={"policy": policy}).close()
    return folder


def reached(pages: HubPages, phase: str, version: int = 0) -> dict[str, Any]:
    """What operators see once the newest model is so far."""

    def found() -> dict[str, Any]:
        facts: dict[str, Any] = pages.get("model/newest")
        return facts if (facts["phase"], facts["version"]) == (phase, version) else {}

    return until(found, f"{phase} of version {version}")


def written_in(folder: Path) -> dict[Path, int]:
    """Every file with its time, but for those by which SQLite's readers know of each other."""
    found = {path: path.stat().st_mtime_ns for path in folder.rglob("*") if path.is_file()}
    return {path: time for path, time in found.items() if path.suffix not in (".db-shm", ".db-wal")}


def texts(facts: dict[str, Any]) -> list[list[tuple[int, str]]]:
    return [[(one["version"], one["text"]) for one in row["answers"]] for row in facts["prompts"]]


@pytest.mark.parametrize(
    "prompts", [["x"] * 2, [""], [" "], ["x" * 501], [f"{n}" for n in range(11)]], ids=len
)
def test_prompts_are_few_short_and_different(prompts: list[str]) -> None:
    assert DashboardConfig(prompts=[f"{n}" + "x" * 499 for n in range(10)]).ask is False
    with pytest.raises(ValidationError):
        DashboardConfig(prompts=prompts)


def test_a_hub_answers_nothing_unless_its_operator_says_so(tmp_path: Path) -> None:
    hub = LoopbackHub(tmp_path / "hub")
    pages = HubPages(hub.fed)
    assert pages.seen("model")["newest"] == pages.get("model/newest") == {"is_on": False}
    for path in ("ask", "again"):
        status, error = pages.change(f"model/newest/{path}", prompt="hello")
        assert status == 503
        assert "ask: true" in error["hint"]
    hub.close()
    assert not (tmp_path / "hub" / FOLDER_NAME).exists()


def test_viewers_ask_only_where_everybody_may_have_the_model_and_not_without_end(
    opened: Opened, model: FakeModel
) -> None:
    pages, _ = opened(ask_by="viewers")
    reached(pages, "ready")
    assert pages.seen("model/newest")["may_ask"]
    url = "/api/v1/model/newest/ask"
    for _ in range(MAX_QUESTIONS // 2):  # of one network
        assert pages.viewer.post(url, json={"prompt": "hello"}).status_code == 200
    refused = pages.viewer.post(url, json={"prompt": "hello"})
    assert refused.json()["error"]["code"] == "busy"
    assert (
        pages.viewer.post(url, json={"prompt": "x"}, headers={"Origin": "http://evil.example"}).status_code
        == 403
    )
    headers = {CSRF_HEADER: pages.operator.get("/api/v1/session").json()["csrf"]}
    assert pages.operator.post(url, json={"prompt": "hello"}, headers=headers).status_code == 200


@pytest.mark.parametrize(("policy", "ask_by"), [("invite", "viewers"), ("open", "operators")])
def test_viewers_may_not_ask_elsewhere(opened: Opened, model: FakeModel, policy: str, ask_by: str) -> None:
    pages, _ = opened(policy=policy, ask_by=ask_by)
    reached(pages, "ready")
    assert not pages.seen("model/newest").get("may_ask")
    assert pages.viewer.post("/api/v1/model/newest/ask", json={"prompt": "hello"}).status_code == 403


def test_a_dashboard_answers_where_its_operator_says_so(
    tmp_path: Path, head: list[Version], model: FakeModel
) -> None:
    with (
        Federation.open(hub_folder(tmp_path, PROMPTS)) as fed,
        Dashboard(fed, "127.0.0.1:0", public=True, is_running=True) as dashboard,
    ):
        dashboard.start()
        facts = httpx.get(f"{dashboard.url.partition('/login')[0]}/api/v1/model/newest").json()
    assert [row["prompt"] for row in facts["prompts"]] == PROMPTS


def test_prompts_are_answered_after_every_round_beside_the_version_before(
    opened: Opened, model: FakeModel, head: list[Version]
) -> None:
    model.answer = HOSTILE
    pages, _ = opened()
    assert texts(reached(pages, "ready")) == [[(0, HOSTILE)], [(0, HOSTILE)]]
    model.answer = "x" * (MAX_CHARACTERS + 1)
    head.append(Version(3, "sha256:3"))
    found = reached(pages, "ready", 3)
    assert texts(found) == [[(3, "x" * MAX_CHARACTERS), (0, HOSTILE)]] * 2
    assert [one["is_cut"] for one in found["prompts"][0]["answers"]] == [True, False]
    assert pages.seen("model")["newest"]["prompts"] == found["prompts"], "everybody sees the same"
    assert [body["messages"][0]["content"] for _, body in model.asked] == PROMPTS * 2
    assert all((body["temperature"], body["max_tokens"]) == (0, 128) for _, body in model.asked)


def test_answers_survive_a_restart_and_a_new_prompt_alone_is_asked(
    opened: Opened, model: FakeModel, tmp_path: Path
) -> None:
    pages, first = opened()
    before = reached(pages, "ready")
    first.stop()
    model.answer = "another answer"
    path = tmp_path / "hub" / "gym-server.yaml"
    path.write_text(path.read_text().replace("What is a soup?", "And a delta?"))
    pages, _ = opened()
    after = reached(pages, "ready")
    assert after["prompts"][1] == before["prompts"][1]
    assert texts(after)[0] == [(0, "another answer")]
    assert len(model.asked) == 3


def test_a_base_without_a_chat_template_continues_the_text(
    opened: Opened, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = FakeModel(monkeypatch, has_chat_template=False)
    pages, _ = opened(["Once"])
    assert texts(reached(pages, "ready")) == [[(0, "an answer")]]
    [(path, body)] = model.asked
    assert (path, body["prompt"]) == ("/v1/completions", "Once")
    model.close()


def test_a_prompt_that_is_refused_says_why(opened: Opened, model: FakeModel) -> None:
    model.answer = ""
    pages, _ = opened(["x"])
    [answer] = reached(pages, "ready")["prompts"][0]["answers"]
    assert (answer["text"], answer["problem"]) == ("", "the prompt is too long")


def test_an_operator_s_question_is_answered_as_a_stream(opened: Opened, model: FakeModel) -> None:
    pages, _ = opened([])
    reached(pages, "ready")
    asked = {"headers": {CSRF_HEADER: pages.operator.get("/api/v1/session").json()["csrf"]}}
    answer = pages.operator.post("/api/v1/model/newest/ask", json={"prompt": "hello"}, **asked)
    assert answer.headers["content-type"].startswith("text/event-stream")
    assert '"content": "an answer"' in answer.text
    [(_, body)] = model.asked
    assert (body["stream"], body["temperature"], body["max_tokens"]) == (True, 0, 512)
    for prompt in ("", "x" * 4001, None):
        refused = pages.operator.post("/api/v1/model/newest/ask", json={"prompt": prompt}, **asked)
        assert refused.status_code == 400
    assert "gym-secret" not in json.dumps(pages.get("model/newest"))
    assert len(model.asked) == 1


def test_a_viewer_may_not_ask_and_sees_no_output(opened: Opened, model: FakeModel) -> None:
    model.status = "failed"
    pages, _ = opened()
    facts = reached(pages, "failed")
    assert facts["output"] == ["line one", "it broke"]
    shown = {"is_on", "is_hidden", "may_ask", "phase", "seconds", "version", "prompts"}
    assert set(pages.seen("model/newest")) == shown
    for path in ("ask", "again"):
        refused = pages.viewer.post(f"/api/v1/model/newest/{path}", json={"prompt": "hello"})
        assert refused.status_code == 403
        without_csrf = pages.operator.post(f"/api/v1/model/newest/{path}", json={"prompt": "hello"})
        assert without_csrf.status_code == 403
    assert not model.asked


@pytest.mark.parametrize("policy", ["invite", "allow-list"])
def test_where_the_model_is_for_members_viewers_see_no_answers(
    policy: str, opened: Opened, model: FakeModel
) -> None:
    model.answer = "a secret of the members"
    pages, _ = opened(policy=policy)
    assert "a secret of the members" in json.dumps(reached(pages, "ready"))
    hidden = {"is_on": True, "is_hidden": True}
    assert pages.seen("model/newest") == pages.seen("model")["newest"] == hidden


def test_a_server_that_failed_is_tried_again_on_request_and_by_the_next_version(
    opened: Opened, model: FakeModel, head: list[Version]
) -> None:
    model.status = "failed"
    pages, _ = opened()
    reached(pages, "failed")
    status, _error = pages.change("model/newest/ask", prompt="hello")
    assert status == 503
    head.append(Version(1, "sha256:1"))
    reached(pages, "failed", 1)
    model.status = "ready"
    assert pages.change("model/newest/again") == {}
    assert texts(reached(pages, "ready", 1))[0] == [(1, "an answer")]


def test_a_version_that_cannot_be_written_is_shown_and_the_hub_is_as_before(opened: Opened) -> None:
    pages, _ = opened()  # the base of this hub is a description, which no process can load
    facts = reached(pages, "failed")
    assert "described" in "\n".join(facts["output"])
    assert facts["bytes"] == 0
    assert pages.seen("overview")["name"]


def test_the_dashboard_of_a_stopped_hub_writes_nothing_into_its_folder(
    opened: Opened, model: FakeModel, tmp_path: Path
) -> None:
    hub = hub_folder(tmp_path, PROMPTS)
    before = written_in(hub)
    pages, newest = opened(is_running=False)
    assert texts(reached(pages, "ready"))[0] == [(0, "an answer")]
    newest.stop()
    assert written_in(hub) == before


def test_viewers_of_one_network_get_half_of_the_questions() -> None:
    limit = QuestionLimit()
    for second in range(MAX_QUESTIONS // 2):
        limit.take(second, "192.0.2.1")
    with pytest.raises(GymError, match="too many questions") as refused:
        limit.take(10, "192.0.2.1")
    assert refused.value.code is ErrorCode.BUSY
    limit.take(10, "198.51.100.1")
