"""The screen ``join``: contribute to a hub, by `gym-client join` as a job whose questions the page answers.

A job has no terminal. So `gym-client join --json` ends at its first open question. The page shows the question as the
command printed it, and the answer starts the command again with what was accepted by name: these terms, and no others.
An invite travels in the environment, since commands are shown and kept.
"""

from __future__ import annotations

import json
import subprocess
import threading
from pathlib import Path
from typing import Annotated, Any

from fastapi import APIRouter, Query
from pydantic import Field

from gym_fed.config.schema.base import StrictModel
from gym_fed.core.child_process import module_command
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.core.text import plain
from gym_fed.web.app import Changing, Looking
from gym_fed.webui.jobs import WebJob
from gym_fed.webui.workbench import Workbench

MAX_RECEIPTS = 200
_STATUS_SECONDS = 60.0
_JOIN = ["gym-client", "join"]
_HUB_JOBS = 50
_statuses = threading.BoundedSemaphore(4)
"""Each is a process that calls a hub."""

Server = Annotated[str, Field(pattern=r"^[A-Za-z0-9\[\]._:-]{1,255}$")]
Invite = Annotated[str, Field(max_length=4096, pattern=r"^[^\x00]*$")]


class JoinRequest(StrictModel):
    """What `gym-client join` is given; without a server, the invite names it, or the hub that was joined last."""

    server: Server | None = None
    invite: Invite = ""
    data: str = Field(default="", max_length=1024)
    columns: str = Field(default="", max_length=1024, pattern=r"^[^\x00]*$")
    name: str = Field(default="", max_length=64)
    rounds: int | None = Field(default=None, ge=1, le=10**6)


class JoinAnswer(StrictModel):
    """A yes to the question at which a job ended; a no needs no request."""

    job: str = Field(max_length=64)
    fingerprint: str | None = Field(default=None, pattern=r"^sha256:[0-9a-f]{64}$")
    accept: str | None = Field(default=None, pattern=r"^[a-z-]{1,32}:[0-9a-f]{32}$")
    accept_restore: bool = False
    invite: Invite = ""


class HubRequest(StrictModel):
    server: Server


def routes(workbench: Workbench) -> APIRouter:
    """``join`` and what is below it."""
    found, jobs = APIRouter(), workbench.jobs

    def begin(words: list[str], invite: str) -> dict[str, Any]:
        if any(job.status == "running" for job in _join_jobs(workbench)):
            raise GymError(
                ErrorCode.STATE_LOCKED, "this machine is joining or contributing already", "stop it first"
            )
        env = {"GYM_INVITE": invite} if invite else {}
        return jobs.start(words, title="Join a hub", env=env).facts()

    @found.get("/join")
    def state(visitor: Looking) -> dict[str, Any]:
        """The newest job that joined, the hubs that this home knows, and its receipts."""
        job = next(iter(_join_jobs(workbench)), None)
        return {"job": None if job is None else job.facts(), **_home()}

    @found.post("/join")
    def join(given: JoinRequest, visitor: Changing) -> dict[str, Any]:
        """Start `gym-client join`: the job."""
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

    @found.post("/join/answer")
    def answer(given: JoinAnswer, visitor: Changing) -> dict[str, Any]:
        """Say yes to the question at which a job ended: the job that goes on."""
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
            words = [
                word for word in words if word != "--no-wait"
            ]  # once joined, it waits for a hub that is away
        return begin(words, given.invite)

    @found.get("/join/account")
    def account(
        server: Annotated[str, Query(max_length=255, pattern=r"^[A-Za-z0-9\[\]._:-]+$")], visitor: Looking
    ) -> dict[str, Any]:
        """Balance and verdicts at a hub, as `gym-client status --json` prints them."""
        if not _statuses.acquire(blocking=False):
            raise GymError(ErrorCode.BUSY, "other pages ask hubs for their accounts", "try again in a moment")
        try:
            _require_known(server)
            return _status(server)
        finally:
            _statuses.release()

    @found.post("/join/leave")
    def leave(given: HubRequest, visitor: Changing) -> dict[str, Any]:
        """Start `gym-client leave`: the job."""
        words = ["gym-client", "leave", f"--server={given.server}", "--json"]
        return jobs.start(words, title=f"Leave {given.server}").facts()

    return found


def _join_jobs(workbench: Workbench) -> list[WebJob]:
    """Of the newest jobs, those that join a hub, the newest first."""
    return [job for job in workbench.jobs.list() if job.command[:2] == _JOIN][:_HUB_JOBS]


def _data(workbench: Workbench, name: str) -> str:
    """A file of rows, as commands get it.

    Raises:
        GymError: ``FILE_NOT_FOUND``, ``PERMISSION_DENIED``.
    """
    place = workbench.inside(name)
    if not place.is_file():
        raise GymError(ErrorCode.FILE_NOT_FOUND, f"no file {name} in {workbench.folder}")
    return str(place.relative_to(workbench.folder))


def _home() -> dict[str, Any]:
    """The hubs that this home knows, what it was given last, and its receipts; never a key."""
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
        "receipts": [_receipt(one) for one in receipts[: -MAX_RECEIPTS - 1 : -1]],
        "num_receipts": len(receipts),
    }


def _receipt(receipt: dict[str, Any]) -> dict[str, Any]:
    """The entry of a hub's ledger that a receipt proves, without the proof, which `gym-client ledger` checks."""
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
    """A viewer's page has this machine call no address of its choice.

    Raises:
        GymError: ``NOT_FOUND`` for a hub that was never joined here.
    """
    from gym_client.identity.home import Home
    from gym_client.identity.pins import with_account

    if all(pin.address != server for pin in with_account(Home.open())):
        raise GymError(ErrorCode.NOT_FOUND, f"this machine has no account at {server}", "join it first")


def _status(server: str) -> dict[str, Any]:
    """Balance and verdicts at a hub, as `gym-client status` prints them.

    Raises:
        GymError: As the command said.
    """
    words = module_command("gym_client.cli.main", "status", f"--server={server}", "--json")
    try:
        done = subprocess.run(
            words,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_STATUS_SECONDS,
            cwd=Path.home(),
        )
    except subprocess.TimeoutExpired as error:
        raise GymError(
            ErrorCode.DEADLINE_EXCEEDED, f"{server} does not answer", "is the hub running?"
        ) from error
    if done.returncode != 0:
        # 503 whatever the hub refused: 401 and 403 would speak of the page's own login.
        said = GymError.last_in(done.stderr)
        message, hint = (said.message, said.hint) if said is not None else ("gym-client status failed", "")
        raise GymError(ErrorCode.UNAVAILABLE, message, hint)
    found: dict[str, Any] = json.loads(done.stdout)
    return found
