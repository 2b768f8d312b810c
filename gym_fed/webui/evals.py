"""The ``evals`` screen: evaluation records, comparisons, the leaderboard, and new evaluations."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from fastapi import APIRouter, Query
from pydantic import Field

from gym_fed.base.models import NANO
from gym_fed.config.schema.base import StrictModel
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.data.reading import parse_columns
from gym_fed.evaluation.leaderboard.board import Leaderboard
from gym_fed.evaluation.suites.store import listing
from gym_fed.web.app import Changing, Looking
from gym_fed.webui.view_process import ViewProcess
from gym_fed.webui.workbench import MAX_ROWS, Workbench, model_of

DEFAULT_FOLDER = "evals"
DEFAULT_BOARD = "leaderboard.jsonl"

Folder = Annotated[str, Query(max_length=1000)]
RecordId = Annotated[str, Query(pattern=r"^[0-9a-f-]{1,36}$")]


class _Evaluation(StrictModel):
    """Options of `gym eval run`."""

    model: str = Field(default=NANO, min_length=1, max_length=300)
    suite: str = Field(default="tiny", pattern=r"^[A-Za-z0-9][\w.-]{0,79}$")
    data: str = Field(default="", max_length=300)
    """A file of the user's own rows, instead of a suite."""
    columns: str = Field(default="", max_length=1000, pattern=r"^[^\x00]*$")
    limit: int | None = Field(default=None, ge=1, le=10**6)
    folder: str = Field(default=DEFAULT_FOLDER, min_length=1, max_length=300)


def routes(workbench: Workbench) -> APIRouter:
    """Create the routes below ``/evals``."""
    router = APIRouter()
    views = ViewProcess("gym_fed.webui.record_views:RecordViews", workbench.folder)

    def ask(view: str, folder: str, **request: Any) -> dict[str, Any]:
        place = workbench.inside(folder).relative_to(workbench.folder)
        return views.ask({"view": view, "folder": str(place), **request})

    @router.get("/evals")
    def listed(visitor: Looking, folder: Folder = DEFAULT_FOLDER) -> dict[str, Any]:
        """List the records in a folder, newest first, and the running evaluations."""
        jobs = [job.facts() for job in workbench.jobs.list() if job.command[1:2] == ["eval"]]
        return {"folder": folder, **ask("list", folder), "jobs": jobs[:20]}

    @router.get("/evals/suites")
    def suites(visitor: Looking) -> dict[str, Any]:
        """List the suites."""
        known = listing()
        return {
            "suites": [
                {"name": name, "about": suite.about, "tasks": len(suite.tasks)}
                for name, suite in known.suites.items()
            ]
        }

    @router.get("/evals/record")
    def record(visitor: Looking, record: RecordId, folder: Folder = DEFAULT_FOLDER) -> dict[str, Any]:
        """Return a record with the confidence intervals of its metrics."""
        return ask("record", folder, record=record)

    @router.get("/evals/samples")
    def samples(
        visitor: Looking,
        record: RecordId,
        task: Annotated[str, Query(max_length=300)],
        folder: Folder = DEFAULT_FOLDER,
        start: Annotated[int, Query(ge=0, le=10**7)] = 0,
        limit: Annotated[int, Query(ge=1, le=50)] = 10,
        only: Literal["", "right", "wrong"] = "",
        text: Annotated[str, Query(max_length=200)] = "",
    ) -> dict[str, Any]:
        """Return samples of a task from index ``start``."""
        return ask(
            "samples", folder, record=record, task=task, start=start, limit=limit, only=only, text=text
        )

    @router.get("/evals/compare")
    def compare(
        visitor: Looking, first: RecordId, second: RecordId, folder: Folder = DEFAULT_FOLDER
    ) -> dict[str, Any]:
        """Compare two records row by row, like `gym eval compare --shared-rows`."""
        return ask("compare", folder, first=first, second=second)

    @router.get("/evals/board")
    def board(visitor: Looking, board: Folder = DEFAULT_BOARD) -> dict[str, Any]:
        """Return the submissions of a leaderboard."""
        path = workbench.inside(board)
        if not path.is_file():
            return {"board": board, "head": "", "submissions": [], "total": 0}
        opened = Leaderboard(path)
        rows = [row.facts() for row in opened.board_rows.values()]
        return {"board": board, "head": opened.head, "submissions": rows[-MAX_ROWS:], "total": len(rows)}

    @router.post("/evals/start")
    def start(given: _Evaluation, visitor: Changing) -> dict[str, Any]:
        """Start `gym eval run`."""
        title = f"Evaluate {given.model} on {given.data or given.suite}"
        return workbench.jobs.start(_command(workbench, given), title=title, folder=given.folder).facts()

    return router


def _command(workbench: Workbench, given: _Evaluation) -> list[str]:
    """Build the command line of an evaluation.

    Raises:
        GymError: ``PERMISSION_DENIED``; ``MODEL_NOT_FOUND``; ``FILE_NOT_FOUND``; ``USAGE`` for an unknown suite or
            invalid columns.
    """
    known = listing()
    if not given.data and given.suite not in known.suites and given.suite not in known.tasks:
        raise GymError(ErrorCode.USAGE, f"no suite {given.suite}", f"one of {', '.join(known.suites)}")
    workbench.inside(given.folder)
    model_of(workbench, given.model)
    name = (
        given.model
        if given.model == NANO or not (workbench.folder / given.model).exists()
        else f"./{given.model}"
    )
    limit = [] if given.limit is None else ["--limit", str(given.limit)]
    if given.data:
        if not workbench.inside(given.data).is_file():
            raise GymError(
                ErrorCode.FILE_NOT_FOUND,
                f"{given.data}: no such file",
                "use a file of rows, such as mine.csv",
            )
        parse_columns(given.columns)
        columns = [f"--columns={given.columns}"] if given.columns else []
        return ["gym", "eval", "run", name, f"--data={given.data}", *columns, *limit]
    command = ["gym", "eval", "run", name, "--suite", given.suite, *limit]
    return [*command, "--output", f"./{given.folder}" if given.folder.startswith("-") else given.folder]
