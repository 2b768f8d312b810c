"""The ``join`` screen: run `gym-client join` as a job and answer its questions on the page.

A job has no terminal, so `gym-client join --json` ends at its first open question. The page displays the question as
the command printed it, and the answer restarts the command with exactly those terms accepted. An invite is passed in
the environment, since commands are displayed and stored.
"""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Annotated, Any

from fastapi import APIRouter, Query
from pydantic import Field

from gym_fed.config.schema.base import StrictModel
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.core.text import plain
from gym_fed.web.app import Changing, Looking
from gym_fed.webui.jobs import WebJob, json_of
from gym_fed.webui.workbench import Workbench

MAX_RECEIPTS = 200
_STATUS_SECONDS = 60.0
_JOIN = ["gym-client", "join"]
_HUB_JOBS = 50
_statuses = threading.BoundedSemaphore(4)
"""Limit for concurrent status requests, each of which is a process."""

Server = Annotated[str, Field(pattern=r"^[A-Za-z0-9\[\]._:-]{1,255}$")]
Invite = Annotated[str, Field(max_length=4096, pattern=r"^[^\x00]*$")]


class JoinRequest(StrictModel):
    """Options of `gym-client join`; without a server, the invite or the last joined hub is used."""

    server: Server | None = None
    invite: Invite = ""
    data: str = Field(default="", max_length=1024)
    columns: str = Field(default="", max_length=1024, pattern=r"^[^\x00]*$")
    name: str = Field(default="", max_length=64)
    rounds: int | None = Field(default=None, ge=1, le=10**6)


class JoinAnswer(StrictModel):
    """Consent to the question at which a job ended."""

    job: str = Field(max_length=64)
    fingerprint: str | None = Field(default=None, pattern=r"^sha256:[0-9a-f]{64}$")
    accept: str | None = Field(default=None, pattern=r"^[a-z-]{1,32}:[0-9a-f]{32}$")
    accept_restore: bool = False
    invite: Invite = ""


class HubRequest(StrictModel):
    server: Server


def routes(workbench: Workbench) -> APIRouter:
    """Create the routes below ``/join``."""
    router, jobs = APIRouter(), workbench.jobs

    def begin(words: list[str], invite: str) -> dict[str, Any]:
        if any(job.status == "running" for job in _join_jobs(workbench)):
            raise GymError(
                ErrorCode.STATE_LOCKED, "this machine is joining or contributing already", "stop it first"
            )
        env = {"GYM_INVITE": invite} if invite else {}
        return jobs.start(words, title="Join a hub", env=env).facts()

    @router.get("/join")
    def state(visitor: Looking) -> dict[str, Any]:
        """Return the newest join job, the home's hubs and its receipts."""
        job = next(iter(_join_jobs(workbench)), None)
        return {"job": None if job is None else job.facts(), **_home()}

    @router.post("/join")
    def join(given: JoinRequest, visitor: Changing) -> dict[str, Any]:
        """Start `gym-client join`."""
        words = [*_JOIN, "--json", "--no-wait"]
        if given.server is not None:
            words.append(f"--server={given.server}")
        if given.data:
            words.append(f"--data={_data(workbench, given.data)}")
        if given.columns:
            words.append(f"--columns={given.columns}")
        if given.name:
            words.append(f"--name={plain(given.name)}")
        if given.rounds is not None:
            words.append(f"--rounds={given.rounds}")
        return begin(words, given.invite)

    @router.post("/join/answer")
    def answer(given: JoinAnswer, visitor: Changing) -> dict[str, Any]:
        """Accept the question at which a job ended and start the job that continues."""
        job = jobs.get(given.job)
        if job.command[:2] != _JOIN:
            raise GymError(ErrorCode.USAGE, f"job {job.id} joins no hub")
        words = [word for word in job.command if word != "--accept-restore"]
        if given.fingerprint is not None:
            words = [word for word in words if not word.startswith("--fingerprint=")]
            words.append(f"--fingerprint={given.fingerprint}")
        if given.accept is not None:
            kind = given.accept.partition(":")[0]
            words = [word for word in words if not word.startswith(f"--accept={kind}:")]
            words.append(f"--accept={given.accept}")
        if given.accept_restore:
            words.append("--accept-restore")
        if given.accept is not None and given.accept.startswith("offer:"):
            words = [word for word in words if word != "--no-wait"]  # later joins wait for an unreachable hub
        return begin(words, given.invite)

    @router.get("/join/account")
    def account(
        server: Annotated[str, Query(max_length=255, pattern=r"^[A-Za-z0-9\[\]._:-]+$")], visitor: Looking
    ) -> dict[str, Any]:
        """Return balance and verdicts at a hub from `gym-client status`."""
        if not _statuses.acquire(blocking=False):
            raise GymError(
                ErrorCode.BUSY, "other pages are requesting accounts from hubs", "try again in a moment"
            )
        try:
            _require_known(server)
            return _status(server)
        finally:
            _statuses.release()

    @router.post("/join/leave")
    def leave(given: HubRequest, visitor: Changing) -> dict[str, Any]:
        """Start `gym-client leave`."""
        words = ["gym-client", "leave", f"--server={given.server}", "--json"]
        return jobs.start(words, title=f"Leave {given.server}").facts()

    return router


def _join_jobs(workbench: Workbench) -> list[WebJob]:
    """List the newest jobs that join a hub, newest first."""
    return [job for job in workbench.jobs.list() if job.command[:2] == _JOIN][:_HUB_JOBS]


def _data(workbench: Workbench, name: str) -> str:
    """Return the path of a data file for a command.

    Raises:
        GymError: ``FILE_NOT_FOUND``, ``PERMISSION_DENIED``.
    """
    place = workbench.inside(name)
    if not place.is_file():
        raise GymError(ErrorCode.FILE_NOT_FOUND, f"no file {name} in {workbench.folder}")
    return str(place.relative_to(workbench.folder))


def _home() -> dict[str, Any]:
    """Return the home's hubs, its last settings and its receipts, but no keys."""
    from gym_client.identity.home import Home
    from gym_client.identity.pins import with_account

    home = Home.open()
    receipts = home.receipts()
    last = home.settings()
    return {
        "hubs": [
            {"address": pin.address, "name": pin.name, "contributor": pin.account, "left": bool(pin.left)}
            for pin in with_account(home)
        ],
        "last": {
            "server": last.get("server"),
            "data": Path(last.get("data") or "").name,
            "name": last.get("name"),
        },
        "receipts": [_receipt(receipt) for receipt in receipts[: -MAX_RECEIPTS - 1 : -1]],
        "num_receipts": len(receipts),
    }


def _receipt(receipt: dict[str, Any]) -> dict[str, Any]:
    """Return the ledger entry of a receipt, without its proof."""
    entry: Any = receipt.get("proof")
    entry = entry.get("entry") if isinstance(entry, dict) else None
    entry = entry if isinstance(entry, dict) else {}
    body = entry.get("body") if isinstance(entry.get("body"), dict) else {}
    named = ("server_round", "verdict", "update", "credit", "amount", "reason", "at")
    return {
        "server": receipt.get("server"),
        "sequence": entry.get("sequence"),
        "kind": entry.get("kind"),
        **{key: body[key] for key in named if isinstance(body.get(key), (str, int, float))},
    }


def _require_known(server: str) -> None:
    """Reject a hub that was never joined from here.

    Otherwise a viewer could make this machine connect to arbitrary addresses.

    Raises:
        GymError: ``NOT_FOUND`` for a hub that was never joined from here.
    """
    from gym_client.identity.home import Home
    from gym_client.identity.pins import with_account

    if all(pin.address != server for pin in with_account(Home.open())):
        raise GymError(ErrorCode.NOT_FOUND, f"this machine has no account at {server}", "join it first")


def _status(server: str) -> dict[str, Any]:
    """Return balance and verdicts at a hub from `gym-client status`.

    Raises:
        GymError: The error of the command.
    """
    try:
        account: dict[str, Any] = json_of(
            ["gym-client", "status", f"--server={server}"], Path.home(), _STATUS_SECONDS
        )
    except GymError as error:
        if error.code is ErrorCode.DEADLINE_EXCEEDED:
            raise GymError(error.code, f"{server} does not answer", "is the hub running?") from error
        # Use status 503 for all errors of the hub, since 401 and 403 would refer to the page's own login.
        raise GymError(ErrorCode.UNAVAILABLE, error.message, error.hint) from error
    return account
