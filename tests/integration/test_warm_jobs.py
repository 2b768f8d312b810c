"""Jobs whose commands are forks of a process that has imported the project: a stop reaches them as it does others."""

from __future__ import annotations

from pathlib import Path

import pytest

from gym_fed.web.jobs import Jobs
from tests.support.wait import until


@pytest.mark.slow
def test_a_stop_interrupts_the_command_of_a_job_that_was_forked(tmp_path: Path, warm_children: None) -> None:
    jobs = Jobs(tmp_path / "jobs")
    words = ["gym-client", "ui", "--home", str(tmp_path / "home"), "--port", "0", "--no-open"]
    job = jobs.start(words, title="a page")
    until(lambda: "token=" in jobs.output(job.id)["text"], "the page's URL")
    jobs.stop(job.id)
    until(lambda: jobs.get(job.id).status == "ended", "the end of the command")
