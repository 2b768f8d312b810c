"""A process that works for the hub: its failure is reported with what it printed, and a stop ends it."""

from __future__ import annotations

import threading
import time

import pytest
from gym_server.rounds.job_process import JobFailed, JobProcess
from pydantic import BaseModel

from tests.support.wait import SECONDS


class _Job(BaseModel):
    height: int = 1


def test_a_job_that_cannot_be_read_fails_with_what_its_process_printed() -> None:
    with pytest.raises(JobFailed) as caught:
        JobProcess("gym_server.evaluations.change_process").run(_Job())
    assert any("validation errors for ChangeJob" in line for line in caught.value.output)


def test_a_process_gives_its_standard_output() -> None:
    printed, errors = JobProcess("this").run(_Job())
    assert printed.startswith("The Zen of Python")
    assert errors == []


def test_a_stop_ends_a_process_that_runs_and_one_that_is_about_to_start() -> None:
    process = JobProcess("http.server")
    failures: list[JobFailed] = []

    def run() -> None:
        try:
            process.run(_Job())
        except JobFailed as failed:
            failures.append(failed)

    thread = threading.Thread(target=run)
    thread.start()
    while process._process is None:
        time.sleep(0.01)
    process.stop()
    thread.join(SECONDS)
    assert not thread.is_alive()
    assert len(failures) == 1
    with pytest.raises(JobFailed):
        process.run(_Job())
