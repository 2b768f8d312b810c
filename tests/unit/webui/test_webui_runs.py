"""The screens ``runs`` and ``run``: what the API gives of a folder of runs, whatever lies in it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import yaml
from starlette.testclient import TestClient

from gym_fed.training.run.folder import FolderLock
from gym_fed.training.run.recent import remember_run
from gym_fed.web.events import Feed, PageEvent
from gym_fed.web.jobs import Jobs, WebJob
from gym_fed.webui.curves import MAX_POINTS, CurvesOfRuns
from gym_fed.webui.run_detail import RunList, config_text
from gym_fed.webui.run_places import RunPlaces
from gym_fed.webui.runs import RunWatch
from gym_fed.webui.workbench import open_workbench
from tests.support.webui_client import webui_client

SECONDS = 20

HOSTILE = "<img src=x onerror=alert(1)>"


def make_run(folder: Path, *, steps: int = 5, finished: bool = False, **config: Any) -> Path:
    """A run's files as `gym train` writes them."""
    folder.mkdir(parents=True)
    settings = {
        "algorithm": "sft",
        "model": "gym-nano",
        "output_dir": str(folder),
        "learning_rate": 0.001,
        **config,
    }
    (folder / "config.yaml").write_text(yaml.safe_dump(settings))
    (folder / "run.json").write_text(json.dumps({"num_processes": 1}))
    lines = [{"step": step, "loss": 1 / step} for step in range(1, steps + 1)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    if finished:
        (folder / "result.json").write_text(json.dumps({"steps": steps, "final_loss": 0.1}))
    return folder


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    make_run(tmp_path / "runs" / "a", finished=True)
    make_run(tmp_path / "runs" / "group" / HOSTILE, model=HOSTILE, lora={"r": 8})
    return tmp_path / "runs"


@pytest.fixture
def client(runs: Path) -> TestClient:
    return webui_client(runs.parent)


def get(client: TestClient, path: str, status: int = 200, **query: Any) -> Any:
    response = client.get(f"/api/v1/{path}", params=query)
    assert response.status_code == status, response.text
    return response.json()


def test_the_list_has_status_figures_and_a_line_of_each_run(client: TestClient, runs: Path) -> None:
    lock = FolderLock(runs / "group" / HOSTILE)
    found = {run["path"]: run for run in get(client, "runs")["runs"]}
    assert {path: run["status"] for path, run in found.items()} == {
        "a": "finished",
        f"group/{HOSTILE}": "running",
    }
    assert found["a"]["spark"] == [1 / step for step in range(1, 6)]
    assert found[f"group/{HOSTILE}"]["model"] == HOSTILE
    lock.release()
    assert {run["status"] for run in get(client, "runs")["runs"]} == {"finished", "unfinished"}


def test_a_search_takes_words_of_name_algorithm_and_model(client: TestClient) -> None:
    assert get(client, "runs", search="gym-nano")["total"] == 1
    assert get(client, "runs", search="GROUP sft")["total"] == 1
    assert get(client, "runs", search="dpo") | {"root": ""} == {
        "root": "",
        "runs": [],
        "total": 0,
        "waiting": [],
    }


@pytest.mark.parametrize(
    "files",
    [
        {"config.yaml": "]["},
        {"config.yaml": "- 1"},
        {"config.yaml": b"\xff\xfe"},
        {"config.yaml": "algorithm: [1]\nmodel: {a: .nan}\nmax_steps: .inf\n2020-01-01: !!set {x}\n"},
        {"metrics.jsonl": '{"step": "x", "loss": []}\n'},
        {"metrics.jsonl": '{"step": 1, "loss": NaN}\n[]\n'},
        {"result.json": "[]"},
        {"result.json": '{"steps": {}, "privacy": 3}'},
        {
            "run.json": "[1]",
            "environment.json": "[" * 5000,
            "rollbacks.json": '[{"step": 1}, {"step": "x"}, 4]',
        },
    ],
    ids=str,
)
def test_a_run_whose_files_are_odd_hides_no_others_and_shows_what_it_can(
    client: TestClient, runs: Path, files: dict[str, str | bytes]
) -> None:
    odd = make_run(runs / "odd")
    for name, content in files.items():
        (odd / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    assert get(client, "runs")["total"] == 3
    found = get(client, "runs/odd", **{"with": "a"})
    assert found["others"][0]["status"] == "finished"


@pytest.mark.parametrize("name", ["../x", "/etc", "link", "a/../../..", "a\x00b", "%2e%2e/x", "~", "."])
def test_a_path_that_leads_out_or_names_no_run_is_refused(client: TestClient, runs: Path, name: str) -> None:
    outside = make_run(runs.parent / "outside")
    (runs / "link").symlink_to(outside)
    quoted = "".join(f"%{byte:02x}" for byte in name.encode())
    for response in (
        client.get(f"/api/v1/runs/{quoted}"),
        client.get("/api/v1/runs/a", params={"with": name}),
        client.post(f"/api/v1/runs/{quoted}/stop"),
        client.post(f"/api/v1/runs/{quoted}/resume"),
    ):
        assert response.status_code in (403, 404), (name, response.text)


def test_a_hundred_thousand_steps_come_thinned_and_a_range_of_them_whole(
    client: TestClient, runs: Path
) -> None:
    make_run(runs / "long", steps=100_000)
    begun = time.process_time()
    found = get(client, "runs/long")["series"]["loss"]
    assert 1000 < len(found) <= MAX_POINTS
    assert (found[0], found[-1]) == ([1, 1.0], [100_000, 1e-5])
    assert time.process_time() - begun < 10
    assert (get(client, "runs/long")["is_thinned"], get(client, "runs/a")["is_thinned"]) == (True, False)
    assert len(get(client, "runs/long", xmin=500, xmax=600)["series"]["loss"]) == 101
    assert get(client, "runs/long", since=99_999)["series"]["loss"] == [[99_999, 1 / 99_999], [100_000, 1e-5]]


def test_settings_roll_backs_and_spikes_of_compared_runs_are_given(client: TestClient, runs: Path) -> None:
    (runs / "a" / "rollbacks.json").write_text(
        json.dumps([{"step": 4, "metric": "loss", "value": "nan", "usual": 0.1, "to_step": 2, "skipped": []}])
    )
    (runs / "a" / "spikes.json").write_text(
        json.dumps([{"step": 3, "metric": HOSTILE, "value": "9", "usual": 1}])
    )
    found = get(client, "runs/a", **{"with": [f"group/{HOSTILE}", f"group/{HOSTILE}"]})
    assert [(mark["kind"], mark["step"], mark["to_step"]) for mark in found["marks"]] == [
        ("spike", 3, None),
        ("rollback", 4, 2),
    ]
    assert [other["path"] for other in found["others"]] == [f"group/{HOSTILE}"]
    assert (found["others"][0]["settings"]["lora.r"], "lora.r" in found["settings"]) == (8, False)
    assert "gym train runs/a/config.yaml" in found["command"]
    assert found["base"] == "runs/a"


def test_at_most_five_runs_are_laid_over_one(client: TestClient) -> None:
    assert client.get("/api/v1/runs/a", params={"with": ["a"] * 6}).status_code == 400


def test_a_viewer_neither_stops_nor_resumes(runs: Path) -> None:
    visitor = webui_client(runs.parent, login=False)
    for action in ("stop", "resume"):
        assert visitor.post(f"/api/v1/runs/a/{action}").status_code == 401
    assert visitor.get("/api/v1/runs").status_code == 401


def test_a_run_with_more_processes_than_cores_is_not_resumed(client: TestClient, runs: Path) -> None:
    folder = make_run(runs / "wide")
    (folder / "run.json").write_text(json.dumps({"num_processes": 10**6}))
    error = client.post("/api/v1/runs/wide/resume").json()["error"]
    assert error["code"] == "usage"
    assert "ran in 1,000,000 processes" in error["message"]


def test_a_finished_run_is_not_resumed_and_one_that_nobody_runs_not_stopped(client: TestClient) -> None:
    assert client.post("/api/v1/runs/a/resume").json()["error"]["code"] == "file-exists"
    assert client.post("/api/v1/runs/a/stop").json()["error"]["code"] == "not-found"


def test_only_the_process_that_has_the_lock_open_is_stopped(client: TestClient, runs: Path) -> None:
    lock = FolderLock(runs / "a")
    other = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    try:
        (runs / "a" / ".lock").write_text(str(other.pid))  # a number that somebody wrote
        assert client.post("/api/v1/runs/a/stop").json()["error"]["code"] == "not-found"
        assert other.poll() is None
    finally:
        other.kill()
        other.wait()
        lock.release()


class Published(Feed):
    """A feed that keeps what was published."""

    def __init__(self) -> None:
        super().__init__(lambda last: ())
        self.events: list[PageEvent] = []

    def publish(self, event: PageEvent) -> None:
        self.events.append(event)


def test_new_points_alone_are_published_and_nothing_where_nothing_changed(runs: Path) -> None:
    feed, curves, jobs = Published(), CurvesOfRuns(), Jobs(runs / ".jobs")
    places = RunPlaces(open_workbench(runs.parent, runs))
    watch = RunWatch(places, feed, curves, RunList(places, curves), jobs)
    watch.publish(["a", ""])
    watch.publish(["a", ""])
    assert feed.events == []
    with (runs / "a" / "metrics.jsonl").open("a") as stream:
        stream.write('{"step": 6, "loss": 0.5}\n')
    watch.publish(["a", ""])
    news = {event.kind: event.data for event in feed.events}
    assert (news["run"]["since"], news["run"]["series"]) == (5, {"loss": [(5, 0.2), (6, 0.5)]})
    assert [line["path"] for line in news["runs"]["changed"]] == ["a"]
    os.truncate(runs / "a" / "metrics.jsonl", 0)
    watch.publish(["a"])
    assert feed.events[-1].data["since"] is None  # the page reads it anew


def test_what_a_run_does_before_its_first_step_is_given_and_published(
    client: TestClient, monkeypatch: pytest.MonkeyPatch, runs: Path
) -> None:
    id = "20260101-000000-0123abcd"
    (runs / ".jobs" / id).mkdir(parents=True)
    output = runs / ".jobs" / id / "output.txt"
    output.write_text(f"loading\nmeasuring the model before its first step: 3 of 9 {HOSTILE}\n")
    job = WebJob(
        id, "train new", ["gym", "train", "x.yaml"], str(make_run(runs / "new", steps=0)), 1, 0.0, 0.0
    )
    monkeypatch.setattr(Jobs, "list", lambda self: [job])
    assert get(client, "runs/new")["phase"] == f"measuring the model before its first step: 3 of 9 {HOSTILE}"
    assert get(client, "runs/a")["phase"] == "", "nobody is at work on it"
    feed, curves = Published(), CurvesOfRuns()
    places = RunPlaces(open_workbench(runs.parent, runs))
    watch = RunWatch(places, feed, curves, RunList(places, curves), Jobs(runs / ".jobs"))
    watch.publish(["new"])
    output.write_text("measuring the model before its first step: 9 of 9\n")
    watch.publish(["new"])
    assert feed.events[-1].data["phase"] == "measuring the model before its first step: 9 of 9"


def test_a_run_is_trained_again_from_the_text_that_it_was_started_with(
    client: TestClient, runs: Path
) -> None:
    assert "learning_rate: 0.001" in get(client, "runs/a")["config"]
    folder, workbench = runs / "a", open_workbench(runs.parent, runs)
    (runs / ".configs").mkdir()
    (runs / ".configs" / "a.yaml").write_text("# mine\n" + 5000 * "#" + "\noutput_dir: runs/a\n")
    (runs.parent / "secret").write_text("secret")

    def job(file: str) -> WebJob:
        return WebJob("id", "train a", ["gym", "train", file], str(folder), 1, 0.0, 0.0)

    assert config_text(folder, [job("runs/.configs/a.yaml")], workbench).endswith("output_dir: runs/a\n")
    for elsewhere in ("secret", "runs/../secret", "runs/.configs/gone.yaml"):
        assert config_text(folder, [job(elsewhere)], workbench).startswith("algorithm:")


def test_runs_that_have_not_begun_are_listed_once_with_their_newest_job(
    client: TestClient, monkeypatch: pytest.MonkeyPatch, runs: Path
) -> None:
    jobs = [
        WebJob(str(number), "train", ["gym", "train"], str(runs / name), 1, 0.0, float(number))
        for number, name in ((3, "new"), (2, "new"), (1, "a"))
    ]
    monkeypatch.setattr(Jobs, "list", lambda self: jobs)
    assert [(one["path"], one["changed"]) for one in get(client, "runs")["waiting"]] == [("new", 3.0)]


def test_files_of_the_pages_are_asked_for_again_after_another_release(client: TestClient) -> None:
    for path in ("/static/app.js", "/static/charts.js", "/static/gym.css"):
        first = client.get(path)
        assert first.headers.get_list("Cache-Control") == ["no-cache"], path
        assert client.get(path, headers={"If-None-Match": first.headers["ETag"]}).status_code == 304


@pytest.mark.parametrize(
    "name", ["config.yaml", "metrics.jsonl", "performance.jsonl", "result.json", "spikes.json", ".lock"]
)
def test_a_pipe_in_the_place_of_a_file_holds_up_no_page(tmp_path: Path, name: str) -> None:
    folder = tmp_path / "runs" / "a"
    folder.mkdir(parents=True)
    (folder / "run.json").write_text("{}")
    (folder / "config.yaml").write_text("algorithm: sft\nmodel: gym-nano\noutput_dir: runs/a\n")
    (folder / name).unlink(missing_ok=True)
    os.mkfifo(folder / name)
    client, found = webui_client(tmp_path), []

    def look() -> None:
        found.extend(client.get(f"/api/v1/{path}").status_code for path in ("runs/a", "runs"))

    page = threading.Thread(target=look, daemon=True)
    page.start()
    page.join(SECONDS)
    assert found == [200, 200]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("result.json", '{"privacy": {}}'),
        ("result.json", "[1]"),
        ("result.json", '{"steps": "x"}'),
        ("run.json", "[" * 100_000),
        ("metrics.jsonl", '{"step": "x"}\n'),
        ("spikes.json", '[{"step": 1e999}]'),
        ("result.json", None),
        ("metrics.jsonl", None),
        ("environment.json", None),
    ],
)
def test_a_run_of_somebody_else_fails_no_page(tmp_path: Path, name: str, text: str | None) -> None:
    folder = tmp_path / "runs" / "a"
    folder.mkdir(parents=True)
    (folder / "run.json").write_text("{}")
    (folder / "config.yaml").write_text("algorithm: sft\nmodel: gym-nano\noutput_dir: runs/a\n")
    (folder / name).write_text(text or "")
    if text is None:
        os.truncate(folder / name, (1 << 30) + 1)  # of zeros that take no room on the disk
    client = webui_client(tmp_path)
    assert [client.get(f"/api/v1/{path}").status_code for path in ("runs/a", "runs")] == [200, 200]


@pytest.mark.parametrize("name", ["config.yaml", "environment.json", "run.json"])
def test_a_link_in_a_run_shows_nothing_of_another_folder(tmp_path: Path, name: str) -> None:
    folder = tmp_path / "runs" / "a"
    folder.mkdir(parents=True)
    (folder / "run.json").write_text("{}")
    (folder / "config.yaml").write_text("algorithm: sft\nmodel: gym-nano\noutput_dir: runs/a\n")
    (tmp_path / "private").write_text('{"rows": "token-of-the-operator", "seed": "token-of-the-operator"}')
    (folder / name).unlink(missing_ok=True)
    (folder / name).symlink_to(tmp_path / "private")
    shown = webui_client(tmp_path).get("/api/v1/runs/a")
    assert shown.status_code == 200
    assert "token-of-the-operator" not in shown.text


def test_runs_of_saves_and_recorded_ones_are_listed_and_others_are_added_by_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GYM_HOME", str(tmp_path / "home"))
    bench = tmp_path / "bench"
    make_run(bench / "runs" / "own")
    saved = make_run(bench / "saves" / "qwen" / "lora", finished=True)
    other, unknown = make_run(tmp_path / "else" / "recorded"), make_run(tmp_path / "else" / "unknown")
    client = webui_client(bench)
    remember_run(other)
    remember_run(tmp_path / "else" / "gone")
    assert {line["path"] for line in get(client, "runs")["runs"]} == {"own", f"@{saved}", f"@{other}"}
    found = get(client, f"runs/@{other}")
    assert (found["series"]["loss"][0], found["is_saved"]) == ([1, 1.0], False)
    get(client, f"runs/@{saved}")
    assert get(client, f"runs/@{unknown}", 403)["error"]["hint"].startswith("add it")
    assert client.post("/api/v1/runs", json={"folder": str(tmp_path)}).status_code == 404
    added = client.post("/api/v1/runs", json={"folder": str(unknown)}).json()
    assert added == {"path": f"@{unknown}"}
    assert get(client, f"runs/@{unknown}", **{"with": ["own"]})["others"][0]["path"] == "own"
    stranger = webui_client(bench, login=False)
    assert stranger.post("/api/v1/runs", json={"folder": str(unknown)}).status_code == 401


def test_a_viewer_sees_a_run_of_the_account_only_after_an_operator_added_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GYM_HOME", str(tmp_path / "home"))
    bench = tmp_path / "bench"
    own, saved = make_run(bench / "runs" / "own"), make_run(bench / "saves" / "lora")
    private = make_run(tmp_path / "else" / "private")
    remember_run(private)
    operator, viewer = webui_client(bench), webui_client(bench, login=False, public=True)
    assert {line["path"] for line in get(operator, "runs")["runs"]} == {"own", f"@{saved}", f"@{private}"}
    seen = get(viewer, "runs")
    assert ({line["path"] for line in seen["runs"]}, seen["total"]) == ({"own", f"@{saved}"}, 2)
    unknown = get(viewer, f"runs/@{tmp_path}/else/none", 403)["error"]["code"]
    assert get(viewer, f"runs/@{private}", 403)["error"]["code"] == unknown
    assert get(viewer, "runs/own", 403, **{"with": [f"@{private}"]})["error"]["code"] == unknown
    assert get(viewer, f"runs/@{saved}/../../../else/private", 403)["error"]["code"] == unknown
    assert viewer.post("/api/v1/runs", json={"folder": str(private)}).status_code == 403
    assert operator.post("/api/v1/runs", json={"folder": str(private)}).status_code == 200
    again = webui_client(bench, login=False, public=True)  # after a restart of the workbench
    assert get(again, "runs")["total"] == 3
    assert get(again, f"runs/@{private}", **{"with": [str(own.name)]})["series"]["loss"]
    assert len(get(operator, "runs")["runs"]) == 3  # added and recent: listed once


def test_changes_of_a_run_of_the_account_are_published_to_operators_only(
    tmp_path: Path, runs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GYM_HOME", str(tmp_path / "home"))
    private = make_run(tmp_path / "else" / "private")
    remember_run(private)
    feed, curves, jobs = Published(), CurvesOfRuns(), Jobs(runs / ".jobs")
    places = RunPlaces(open_workbench(runs.parent, runs))
    watch = RunWatch(places, feed, curves, RunList(places, curves), jobs)
    asked = ["a", f"@{private}", ""]
    watch.publish(asked)
    for folder in (runs / "a", private):
        with (folder / "metrics.jsonl").open("a") as stream:
            stream.write('{"step": 6, "loss": 0.5}\n')
    watch.publish(asked)
    for_viewers = json.dumps([event.data for event in feed.events if not event.for_operators])
    assert '"a"' in for_viewers
    assert str(private) not in for_viewers
    hidden = {event.kind: event.data for event in feed.events if event.for_operators}
    assert hidden["run"]["path"] == f"@{private}"
    assert [line["path"] for line in hidden["runs"]["changed"]] == [f"@{private}"]


@pytest.mark.parametrize("content", ["{}", "[", '["relative", 3, "/a\\u0000b"]', "[" * 5000])
def test_a_damaged_list_of_recent_runs_hides_no_others(
    client: TestClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: str
) -> None:
    monkeypatch.setenv("GYM_HOME", str(tmp_path / "home"))
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "recent-runs.json").write_text(content)
    assert get(client, "runs")["total"] > 0


def test_what_was_gained_is_what_the_run_has_written(client: TestClient, runs: Path) -> None:
    check = {"held_out": {"num_rows": 3, "before": 2.0, "after": 1.0, "stderr": None}, "warnings": ["w"]}
    folder = make_run(runs / "checked", finished=True)
    result = json.loads((folder / "result.json").read_text())
    (folder / "result.json").write_text(json.dumps({**result, "check": check}))
    assert get(client, "runs/checked")["check"] == check
