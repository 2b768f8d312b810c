"""Jobs are real processes: they run, stop, are killed, and are found by a second workbench."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.web import jobs as jobs_module
from gym_fed.web.jobs import MAX_OUTPUT_BYTES, Jobs, WebJob
from tests.support.wait import SECONDS

_SLEEPER = """
import signal, sys, time
signal.signal(signal.SIGINT, lambda *_: (print("interrupted", flush=True), DEAF or sys.exit(13)))
DEAF = "deaf" in sys.argv
print("begun", sys.argv[1:], flush=True)
time.sleep(120)
"""
"""A command that takes a while; with the word ``deaf`` it goes on after Ctrl-C."""


@pytest.fixture
def jobs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Jobs:
    (tmp_path / "sleeper.py").write_text(_SLEEPER)
    monkeypatch.setitem(jobs_module.PROGRAMS, "sleeper", "sleeper")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return Jobs(tmp_path / "jobs", tmp_path)


def wait(jobs: Jobs, job: WebJob, until: Callable[[WebJob], bool], seconds: float = SECONDS) -> WebJob:
    """The job, once it is so."""
    end = time.monotonic() + seconds
    while not until(found := jobs.get(job.id)):
        assert time.monotonic() < end, (found, jobs.output(job.id)["text"])
        time.sleep(0.02)
    return found


def wait_output(jobs: Jobs, job: WebJob, text: str) -> None:
    wait(jobs, job, lambda found: text in jobs.output(found.id)["text"])


def test_a_command_that_ends_leaves_its_output_and_exit_code(jobs: Jobs) -> None:
    job = jobs.start(["gym", "runs", "list", "nowhere"], title="List", folder="x")
    ended = wait(jobs, job, lambda found: found.status == "ended")
    assert (ended.exit_code, ended.title, ended.folder) == (ErrorCode.FILE_NOT_FOUND.exit_code, "List", "x")
    assert "no folder at nowhere" in jobs.output(job.id)["text"]
    assert [found.id for found in jobs.list()] == [job.id]


def test_a_job_outlives_its_workbench_and_a_second_one_finds_and_stops_it(jobs: Jobs, tmp_path: Path) -> None:
    program = (
        "import sys; from pathlib import Path; from gym_fed.web import jobs; jobs.PROGRAMS['sleeper'] = 'sleeper'\n"
        "print(jobs.Jobs(Path(sys.argv[1])).start(['sleeper', 'a b'], title='t').id, flush=True); input()"
    )
    first = subprocess.Popen(
        [sys.executable, "-c", program, str(jobs.folder)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=tmp_path,
    )
    assert first.stdout is not None
    id = first.stdout.readline().strip()
    first.kill()
    first.wait()
    job = jobs.get(id)
    wait_output(jobs, job, "begun ['a b']")
    assert jobs.get(id).status == "running"
    jobs.stop(id)
    ended = wait(jobs, job, lambda found: found.status == "ended")
    assert (ended.exit_code, ended.stops) == (13, 1)


def test_a_second_stop_ends_what_ignores_the_first(jobs: Jobs) -> None:
    job = jobs.start(["sleeper", "deaf"], title="t")
    wait_output(jobs, job, "begun")
    assert jobs.stop(job.id).status == "running"
    wait_output(jobs, job, "interrupted")
    jobs.stop(job.id)
    assert wait(jobs, job, lambda found: found.status == "ended").exit_code == -signal.SIGTERM


def test_a_killed_group_counts_as_killed_and_stopping_it_again_does_nothing(jobs: Jobs) -> None:
    job = jobs.start(["sleeper"], title="t")
    wait_output(jobs, job, "begun")
    os.killpg(job.pid, signal.SIGKILL)
    assert wait(jobs, job, lambda found: found.status == "killed").exit_code is None
    assert jobs.stop(job.id).status == "killed"


def test_a_process_number_that_is_used_again_is_no_running_job(jobs: Jobs) -> None:
    job = jobs.start(["gym", "--version"], title="t")
    wait(jobs, job, lambda found: found.status == "ended")
    place = jobs.folder / job.id
    (place / "status.json").unlink()
    facts = json.loads((place / "job.json").read_text()) | {"pid": os.getpid()}
    facts["process_started_at"] = -60.0  # no process is older than the machine's start
    (place / "job.json").write_text(json.dumps(facts))
    assert Jobs(jobs.folder).stop(job.id).status == "killed"  # and this process got no signal
    again = Jobs(jobs.folder)
    own = psutil.Process()
    facts["process_started_at"] = own.create_time() - psutil.boot_time()
    (place / "job.json").write_text(json.dumps(facts))
    assert again.get(job.id).status == "running"
    facts["started_at"] = psutil.boot_time() - 60  # the machine was started since
    (place / "job.json").write_text(json.dumps(facts))
    assert Jobs(jobs.folder).get(job.id).status == "killed"


@pytest.mark.parametrize(
    "id", ["..", "../jobs", "20260101-000000-0123456", "a/b", "x\x00", "", "20260101-000000-01234567"]
)
def test_an_id_that_names_no_job_is_not_found(jobs: Jobs, id: str) -> None:
    for call in (jobs.get, jobs.stop, jobs.output):
        with pytest.raises(GymError) as caught:
            call(id)
        assert caught.value.code is ErrorCode.NOT_FOUND


@pytest.mark.parametrize("command", [[], ["sh", "-c", "true"], ["/bin/true"], ["gym", "a\x00b"]])
def test_only_commands_of_ours_are_started(jobs: Jobs, command: list[str]) -> None:
    with pytest.raises(GymError) as caught:
        jobs.start(command, title="t")
    assert caught.value.code is ErrorCode.USAGE
    assert jobs.list() == []


def test_output_is_read_in_parts_that_break_no_character(jobs: Jobs) -> None:
    job = jobs.start(["gym", "--version"], title="t")
    wait(jobs, job, lambda found: found.status == "ended")
    text = "x" + "é" * MAX_OUTPUT_BYTES
    (jobs.folder / job.id / "output.txt").write_text(text, encoding="utf-8")
    parts, offset = [], 0
    while (part := jobs.output(job.id, offset))["text"]:
        assert len(part["text"].encode()) <= MAX_OUTPUT_BYTES
        parts.append(part["text"])
        offset = part["next"]
    assert "".join(parts) == text
    assert jobs.output(job.id, -4)["text"] == "éé"


def test_the_last_line_of_a_job_is_the_last_one_with_words(jobs: Jobs) -> None:
    job = jobs.start(["gym", "--version"], title="t")
    wait(jobs, job, lambda found: found.status == "ended")
    output = jobs.folder / job.id / "output.txt"
    for printed, last in (
        ("", ""),
        ("one\ntwo \n\n", "two"),
        ("x" * 9000 + "\nmeasuring: 3 of 9", "measuring: 3 of 9"),
    ):
        output.write_text(printed)
        assert jobs.last_line(job.id) == last


def test_a_workbench_that_is_killed_before_it_wrote_the_job_starts_nothing(
    jobs: Jobs, tmp_path: Path
) -> None:
    place = jobs.folder / "20260101-000000-01234567"
    place.mkdir(parents=True)
    subprocess.run(
        [sys.executable, "-m", "gym_fed.web.jobs", str(place), "sleeper"],
        stdin=subprocess.DEVNULL,
        check=True,
        timeout=SECONDS,
    )
    assert list(place.iterdir()) == []


def test_variables_of_a_job_are_written_nowhere(jobs: Jobs) -> None:
    job = jobs.start(["gym", "--version"], title="t", env={"SECRET_TOKEN": "hunter2"})
    wait(jobs, job, lambda found: found.status == "ended")
    assert not any(b"hunter2" in file.read_bytes() for file in jobs.folder.rglob("*.*"))
