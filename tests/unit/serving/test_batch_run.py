"""A batch run answers every request once, records failures, and resumes after a stop or a torn line."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import pytest

from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.serving.batch_input import BatchInput, BatchRequest, check_body, check_input
from gym_fed.serving.batch_run import BatchOutput, BatchReport, run_batch, seeded
from tests.support.wait import SECONDS

COMPLETIONS = "/v1/completions"
LINE = '{"custom_id": "r1", "response": {"status_code": 200}}'


def given(folder: Path, count: int = 6) -> BatchInput:
    lines = [
        {
            "custom_id": f"r{number}",
            "method": "POST",
            "url": COMPLETIONS,
            "body": {"model": "m", "prompt": str(number)},
        }
        for number in range(count)
    ]
    path = folder / "in.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return check_input(path, check_body)


def echo(url: str, body: dict[str, Any]) -> dict[str, Any]:
    return {
        "said": body["prompt"],
        "seed": body["seed"],
        "usage": {"prompt_tokens": 1, "completion_tokens": 2},
    }


def opened(folder: Path, errors: str | None = None, **belongs: Any) -> BatchOutput:
    ids = frozenset(f"r{number}" for number in range(6))
    return BatchOutput(
        folder / "out.jsonl", folder / errors if errors else None, belongs_to=belongs, custom_ids=ids
    )


def run(
    folder: Path, answer: Any = echo, *, at_once: int = 3, errors: str | None = None, **more: Any
) -> BatchReport:
    with opened(folder, errors) as output:
        return run_batch(given(folder), output, answer, at_once=at_once, seed=7, **more)


def lines(folder: Path, name: str = "out.jsonl") -> dict[str, Any]:
    found = [json.loads(line) for line in (folder / name).read_text().splitlines()]
    assert len({line["custom_id"] for line in found}) == len(found)
    return {line["custom_id"]: line for line in found}


def test_every_request_gets_one_line_in_openais_form(tmp_path: Path) -> None:
    reports: list[BatchReport] = []
    report = run(tmp_path, on_report=reports.append)
    found = lines(tmp_path)
    assert sorted(found) == [f"r{number}" for number in range(6)]
    line = found["r4"]
    assert line["id"].startswith("batch_req_")
    assert line["error"] is None
    assert line["response"]["status_code"] == 200
    assert line["response"]["body"]["said"] == "4"
    assert (report.done, report.failed, report.resumed) == (6, 0, 0)
    assert (report.prompt_tokens, report.completion_tokens) == (6, 12)
    assert [r.done for r in reports] == [1, 2, 3, 4, 5, 6]


def test_a_refused_request_gets_its_line_and_the_rest_goes_on(tmp_path: Path) -> None:
    def answer(url: str, body: dict[str, Any]) -> dict[str, Any]:
        if body["prompt"] == "2":
            raise GymError(ErrorCode.TOO_LARGE, "the prompt does not fit", "shorten it")
        return echo(url, body)

    report = run(tmp_path, answer, errors="errors.jsonl")
    assert (report.done, report.failed) == (6, 1)
    assert len(lines(tmp_path)) == 5
    failed = lines(tmp_path, "errors.jsonl")["r2"]["response"]
    assert failed["status_code"] == 413
    assert "does not fit" in failed["body"]["error"]["message"]
    again = run(tmp_path, answer, errors="errors.jsonl")
    assert (again.done, again.failed, again.resumed) == (6, 1, 6)


@pytest.mark.parametrize("error", [GymError(ErrorCode.INTERNAL, "broken"), ZeroDivisionError()])
def test_what_is_not_one_requests_own_fault_ends_the_run(tmp_path: Path, error: Exception) -> None:
    stopped: list[bool] = []

    def answer(url: str, body: dict[str, Any]) -> dict[str, Any]:
        if body["prompt"] == "3":
            raise error
        return echo(url, body)

    with pytest.raises(type(error)):
        run(tmp_path, answer, at_once=1, on_stop=lambda: stopped.append(True))
    assert stopped == [True]
    assert sorted(lines(tmp_path)) == ["r0", "r1", "r2"]
    assert run(tmp_path).resumed == 3
    assert len(lines(tmp_path)) == 6


def test_ctrl_c_keeps_what_was_written_and_stops_what_runs(tmp_path: Path) -> None:
    release = threading.Event()

    def answer(url: str, body: dict[str, Any]) -> dict[str, Any]:
        if body["prompt"] != "0":
            assert release.wait(SECONDS), "the run did not stop what was under way"
        return echo(url, body)

    def interrupt(report: BatchReport) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(tmp_path, answer, on_report=interrupt, on_stop=release.set)
    assert sorted(lines(tmp_path)) == ["r0"]
    run(tmp_path)
    assert len(lines(tmp_path)) == 6


def test_a_resumed_run_has_the_seeds_of_an_unbroken_one(tmp_path: Path) -> None:
    (tmp_path / "whole").mkdir()
    run(tmp_path / "whole")
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path, on_report=interrupt_after(2))
    with open(tmp_path / "out.jsonl", "ab") as file:
        file.write(b'{"custom_id": "r5", "resp')  # a kill in the middle of a line
    run(tmp_path)
    assert lines(tmp_path) == lines(tmp_path / "whole")


def interrupt_after(count: int) -> Any:
    def interrupt(report: BatchReport) -> None:
        if report.done >= count:
            raise KeyboardInterrupt

    return interrupt


def test_a_seed_of_its_own_is_left_alone() -> None:
    own = BatchRequest(1, "a", COMPLETIONS, {"prompt": "x", "seed": 3})
    none = BatchRequest(1, "a", COMPLETIONS, {"prompt": "x"})
    assert seeded(own, 0)["seed"] == 3
    assert seeded(none, 0) == seeded(none, 0)
    drawn = {
        seeded(none, 0)["seed"],
        seeded(none, 1)["seed"],
        seeded(BatchRequest(1, "b", COMPLETIONS, {}), 0)["seed"],
    }
    assert len(drawn) == 3
    assert "seed" not in seeded(BatchRequest(1, "a", "/v1/embeddings", {"input": "x"}), 0)


def test_a_full_queue_is_waited_for_and_refuses_only_who_is_alone(tmp_path: Path) -> None:
    lock, running, busy = threading.Lock(), [0], [0]

    def answer(url: str, body: dict[str, Any]) -> dict[str, Any]:
        with lock:
            if running[0] >= 2 or body["prompt"] == "5":  # the last one never fits
                busy[0] += 1
                raise GymError(ErrorCode.BUSY, "as many wait as may", "try again in 1 seconds")
            running[0] += 1
        threading.Event().wait(0.01)
        with lock:
            running[0] -= 1
        return echo(url, body)

    report = run(tmp_path, answer, at_once=6)
    assert (report.done, report.failed) == (6, 1)
    assert lines(tmp_path)["r5"]["response"]["status_code"] == 429
    assert 1 <= busy[0] < 20


def test_an_output_of_another_run_is_refused(tmp_path: Path) -> None:
    with opened(tmp_path, base="a", seed=1) as output:
        output.write(json.loads(LINE), failed=False)
    opened(tmp_path, base="a", seed=1).close()
    with pytest.raises(GymError, match="seed was 1, but is now 2") as caught:
        opened(tmp_path, base="a", seed=2)
    assert caught.value.code is ErrorCode.FILE_EXISTS
    with opened(tmp_path, base="a", seed=1) as output:
        output.pin({"base_digest": "x"})
    with opened(tmp_path, base="a", seed=1) as output, pytest.raises(GymError, match="base_digest was 'x'"):
        output.pin({"base_digest": "y"})


def test_a_run_that_answered_nothing_stands_in_nobodys_way(tmp_path: Path) -> None:
    with opened(tmp_path, base="nope", seed=1) as output:
        output.pin({"base_digest": "x"})
    with opened(tmp_path, base="a", seed=2) as output:
        output.pin({"base_digest": "y"})
        with pytest.raises(GymError) as caught:
            opened(tmp_path, base="b")
        assert caught.value.code is ErrorCode.STATE_LOCKED, "one that is at work does"
        output.write(json.loads(LINE), failed=True)
    with pytest.raises(GymError, match="base was 'a', but is now 'nope'"):
        opened(tmp_path, base="nope", seed=1)
    with opened(tmp_path, base="a", seed=2) as output, pytest.raises(GymError, match="base_digest was 'y'"):
        output.pin({"base_digest": "x"})


@pytest.mark.parametrize("errors", [None, "errors.jsonl"])
def test_a_run_that_ends_before_its_first_line_leaves_no_file(tmp_path: Path, errors: str | None) -> None:
    with pytest.raises(GymError, match="nothing was run"), opened(tmp_path, errors, base="a"):
        raise GymError(ErrorCode.DATA_INVALID, "nothing was run")
    assert list(tmp_path.iterdir()) == []
    with opened(tmp_path, errors, base="b") as output:
        output.write(json.loads(LINE), failed=False)
    with pytest.raises(GymError, match="stopped"), opened(tmp_path, errors, base="b"):
        raise GymError(ErrorCode.INTERRUPTED, "stopped")
    assert list(lines(tmp_path)) == ["r1"]


def test_a_file_that_no_batch_wrote_is_not_touched(tmp_path: Path) -> None:
    (tmp_path / "out.jsonl").write_text("mine")
    with pytest.raises(GymError, match="not written by a batch run"):
        opened(tmp_path)
    assert (tmp_path / "out.jsonl").read_text() == "mine"
    assert not (tmp_path / "out.jsonl.batch.json").exists()


def test_two_processes_do_not_write_to_one_output(tmp_path: Path) -> None:
    with opened(tmp_path), pytest.raises(GymError) as caught:
        opened(tmp_path)
    assert caught.value.code is ErrorCode.STATE_LOCKED


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"custom_id": "r1"}', "line 1 is not an answer"),
        (LINE.replace("r1", "r9"), "'r9' is not in the input"),
        (f"{LINE}\n{LINE}", "line 2: 'r1' is answered twice"),
    ],
)
def test_lines_that_no_run_wrote_are_refused(tmp_path: Path, line: str, message: str) -> None:
    opened(tmp_path).close()
    (tmp_path / "out.jsonl").write_text(line + "\n")
    with pytest.raises(GymError, match=message):
        opened(tmp_path)
