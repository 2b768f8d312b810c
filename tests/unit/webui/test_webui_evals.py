"""The screen ``evals``: records of a folder with intervals and samples, paired comparison, the board, and a job."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

from gym_fed.evaluation.leaderboard.submissions import submit
from gym_fed.evaluation.records.writer import write_record
from gym_fed.evaluation.results import Figure
from gym_fed.trust.identity.keys import SigningKey
from gym_fed.webui.record_views import wilson_interval
from tests.support.evaluations import answer_task, choice_task, results_of
from tests.support.webui_client import webui_client

RIGHT = [True] * 30 + [False] * 10
WORSE = [True] * 10 + [False] * 30


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("bench")
    answers = ["4"] * 38 + ["<b>5</b>", "y" * 100_000]
    first = results_of(choice_task("wet", RIGHT), answer_task("sums", answers))
    second = results_of(choice_task("wet", WORSE), model="<script>x</script>", digest="c" * 64)
    for results in (first, second):
        write_record(results, found / "evals")
    submit(
        first,
        model_name="nano",
        organization="me",
        board=found / "leaderboard.jsonl",
        key=SigningKey.generate(),
    )
    return found


@pytest.fixture(scope="module")
def client(folder: Path) -> TestClient:
    return webui_client(folder)


@pytest.fixture(scope="module")
def ids(client: TestClient) -> dict[str, str]:
    return {row["model"]: row["id"] for row in get(client, "evals")["records"]}


def get(client: TestClient, path: str, **query: Any) -> Any:
    response = client.get(f"/api/v1/{path}", params=query)
    assert response.status_code == 200, response.text
    return response.json()


def test_records_are_listed_with_their_figures(client: TestClient) -> None:
    found = get(client, "evals")
    assert (found["total"], found["problems"], found["jobs"]) == (2, [], [])
    figures = {
        row["model"]: {one["task"]: one["value"] for one in row["figures"]} for row in found["records"]
    }
    assert figures == {"gym-nano": {"wet": 0.75, "sums": 0.95}, "<script>x</script>": {"wet": 0.25}}


def test_a_damaged_record_is_named_and_hides_no_other(client: TestClient, folder: Path) -> None:
    path = folder / "evals/data/wet/local/x/00000000-0000-4000-8000-000000000000.json"
    path.parent.mkdir(parents=True)
    path.write_text("{}")
    try:
        found = get(client, "evals")
    finally:
        path.unlink()
    assert len(found["records"]) == 2
    assert path.name in found["problems"][0]


def test_a_record_has_intervals_for_every_figure(client: TestClient, ids: dict[str, str]) -> None:
    found = get(client, "evals/record", record=ids["gym-nano"])
    wet = next(task for task in found["tasks"] if task["task"] == "wet")
    low, high = wet["figures"]["acc"]["interval"]
    assert low < 0.75 < high
    assert not wet["is_group"]


@pytest.mark.parametrize(
    ("share", "n", "low", "high"),
    [(0.0, 12, 0.0, 0.2425), (1.0, 12, 0.7575, 1.0), (0.5, 100, 0.4038, 0.5962)],
)
def test_the_interval_of_a_share_is_wilsons(share: float, n: int, low: float, high: float) -> None:
    assert wilson_interval(share, n) == pytest.approx((low, high), abs=1e-4)


def test_the_interval_of_another_figure_is_that_many_standard_errors(tmp_path: Path) -> None:
    results = results_of(choice_task("wet", RIGHT))
    task = results.tasks["wet"]
    samples = tuple(replace(one, metrics={"acc": 0.5}) for one in task.samples)
    figures = {"acc": Figure(value=0.5, stderr=0.1, num_samples=40)}
    given = replace(results, tasks={"wet": replace(task, figures=figures, samples=samples)})
    record = write_record(given, tmp_path / "evals").stem
    [found] = get(webui_client(tmp_path), "evals/record", record=record)["tasks"]
    assert found["figures"]["acc"]["interval"] == pytest.approx([0.3040036, 0.6959964])


def test_samples_are_filtered_and_cut(client: TestClient, ids: dict[str, str]) -> None:
    found = get(client, "evals/samples", record=ids["gym-nano"], task="sums", only="wrong")
    assert [(sample["number"], sample["is_right"]) for sample in found["samples"]] == [
        (38, False),
        (39, False),
    ]
    assert found["samples"][0]["answer"] == "<b>5</b>"
    assert len(found["samples"][1]["answer"]) == 4000
    page = get(client, "evals/samples", record=ids["gym-nano"], task="wet", start=30, limit=20)
    assert (page["total"], len(page["samples"])) == (40, 10)
    assert get(client, "evals/samples", record=ids["gym-nano"], task="wet", text="question 7:")["total"] == 1


def test_two_records_are_compared_row_by_row(client: TestClient, ids: dict[str, str]) -> None:
    found = get(client, "evals/compare", first=ids["gym-nano"], second=ids["<script>x</script>"])
    [task] = found["tasks"]
    difference = task["metrics"]["acc"]
    assert (difference["difference"], difference["first_only"], difference["second_only"]) == (0.5, 20, 0)
    assert difference["lower"] > 0
    assert found["missing"] == ["sums"]


def test_the_board_says_self_reported(client: TestClient) -> None:
    found = get(client, "evals/board")
    assert [(row["model_name"], row["status"]) for row in found["submissions"]] == [("nano", "self-reported")]
    assert get(client, "evals/board", board="none.jsonl")["total"] == 0


@pytest.mark.parametrize(
    ("path", "query", "status"),
    [
        ("evals", {"folder": "../other"}, 403),
        ("evals/board", {"board": "/etc/passwd"}, 403),
        ("evals/record", {"record": "../x"}, 400),
        ("evals/record", {"record": "00000000"}, 404),
        ("evals/samples", {"record": "0", "task": "wet", "limit": 51}, 400),
    ],
)
def test_what_is_not_below_the_folder_is_refused(
    client: TestClient, path: str, query: dict[str, Any], status: int
) -> None:
    assert client.get(f"/api/v1/{path}", params=query).status_code == status


def test_an_evaluation_starts_as_the_command_that_a_person_would_type(
    client: TestClient, folder: Path
) -> None:
    given = {"model": "gym-nano", "suite": "tiny", "limit": 2}
    assert webui_client(folder, login=False).post("/api/v1/evals/start", json=given).status_code == 401
    assert client.post("/api/v1/evals/start", json={**given, "suite": "--data"}).status_code in (400, 422)
    assert client.post("/api/v1/evals/start", json={**given, "model": "../x"}).status_code == 403
    assert client.post("/api/v1/evals/start", json={**given, "model": "--output"}).status_code == 404
    job = client.post("/api/v1/evals/start", json=given).json()
    client.post(f"/api/v1/jobs/{job['id']}/stop")
    wanted = ["gym", "eval", "run", "gym-nano", "--suite", "tiny", "--limit", "2", "--output", "evals"]
    assert job["command"] == wanted
    assert get(client, "evals")["jobs"][0]["id"] == job["id"]
    assert "tiny" in {suite["name"] for suite in get(client, "evals/suites")["suites"]}


def test_an_evaluation_on_own_rows_starts_as_the_command_that_a_person_would_type(
    client: TestClient, folder: Path
) -> None:
    (folder / "mine.csv").write_text("question,answer\nWho?,I\n")
    given = {
        "model": "gym-nano",
        "data": "mine.csv",
        "columns": "prompt=question,completion=answer",
        "limit": 1,
    }
    assert client.post("/api/v1/evals/start", json={**given, "data": "../x.csv"}).status_code == 403
    assert client.post("/api/v1/evals/start", json={**given, "data": "away.csv"}).status_code == 404
    assert client.post("/api/v1/evals/start", json={**given, "columns": "prompt"}).status_code in (400, 422)
    job = client.post("/api/v1/evals/start", json=given).json()
    client.post(f"/api/v1/jobs/{job['id']}/stop")
    rows = ["--data=mine.csv", "--columns=prompt=question,completion=answer"]
    assert job["command"] == ["gym", "eval", "run", "gym-nano", *rows, "--limit", "1"]
    assert job["title"] == "Evaluate gym-nano on mine.csv"
