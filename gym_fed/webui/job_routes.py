"""Jobs as pages see them: the list, one of them, what it printed, and its stop."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Query

from gym_fed.web.app import Changing, Looking
from gym_fed.webui.workbench import Workbench


def routes(workbench: Workbench) -> APIRouter:
    """``jobs`` and what is below it."""
    found, jobs = APIRouter(), workbench.jobs

    @found.get("/jobs")
    def listed(visitor: Looking) -> dict[str, Any]:
        """The newest jobs."""
        every = jobs.list()
        return {"jobs": [job.facts() for job in every], "total": len(every)}

    @found.get("/jobs/{id}")
    def one(id: str, visitor: Looking) -> dict[str, Any]:
        """One job."""
        return jobs.get(id).facts()

    @found.get("/jobs/{id}/output")
    def output(
        id: str, visitor: Looking, offset: Annotated[int, Query(ge=-(2**40), le=2**40)] = 0
    ) -> dict[str, Any]:
        """What a job printed, from a byte of its output on."""
        return jobs.output(id, offset)

    @found.post("/jobs/{id}/stop")
    def stop(id: str, visitor: Changing) -> dict[str, Any]:
        """Stop a job, the second time at once: the job."""
        return jobs.stop(id).facts()

    return found
