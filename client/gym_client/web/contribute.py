"""The HTTP routes of the ``join`` screen, in `gym-client ui` and in the workbench.

The page does not run an agent itself: it starts `gym-client join` as a job, which keeps running when the page is
closed. A job has no terminal, so `gym-client join --json` ends at its first open question. The page displays the
question as the command printed it, and the user's answer restarts the command with exactly those terms accepted. An
invite is passed through the environment, since command lines are displayed and stored.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import psutil
from fastapi import APIRouter, Query
from pydantic import Field

from gym_client.agent.limits import set_limits
from gym_client.agent.pauses import is_paused, set_paused, set_resumed
from gym_client.agent.policy import Policy
from gym_client.identity.home import Home
from gym_client.identity.pins import with_account
from gym_fed.config.schema.base import StrictModel
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.core.text import plain
from gym_fed.trust.identity.login import INVITE_SCHEME, find_invite, parse_invite
from gym_fed.web.access import Role
from gym_fed.web.app import Changing, Looking
from gym_fed.web.jobs import Jobs, WebJob, json_of

MAX_RECEIPTS = 200
MAX_FILES = 500
"""Maximum number of file names that the page offers."""
_REPORT_SECONDS = 60.0
_JOIN = ["gym-client", "join"]
_HUB_JOBS = 50
_MAX_REPORTS = 4
_reports = threading.BoundedSemaphore(_MAX_REPORTS)
"""Maximum concurrent hub reports, each of which is a process."""


@dataclass(frozen=True)
class Workplace:
    """The settings of a page on which a user contributes.

    Attributes:
        jobs: The processes that the page has started.
        folder: Folder of the data files, to which relative names refer.
        home: The contributor's home; None for the default one.
        options: Options that are added to every command, such as ``--home``.
        files: Returns the names of the data files in the folder, newest first.
        takes_any_path: True if a data file may be anywhere on this machine.
        invite: An invite that the page displays.
        link_problem: Why the link that opened the page is not a valid invite; empty if it is.
    """

    jobs: Jobs
    folder: Path
    files: Callable[[], list[str]]
    home: Path | None = None
    options: tuple[str, ...] = ()
    takes_any_path: bool = False
    invite: str = ""
    link_problem: str = ""


Server = Annotated[str, Field(pattern=r"^[A-Za-z0-9\[\]._:-]{1,255}$")]
Invite = Annotated[str, Field(max_length=4096, pattern=r"^[^\x00]*$")]


AskedServer = Annotated[str, Query(max_length=255, pattern=r"^[A-Za-z0-9\[\]._:-]+$")]


class JoinRequest(StrictModel):
    """Options of `gym-client join`. Without a server, the hub is that of the invite or the one joined last."""

    server: Server | None = None
    invite: Invite = ""
    """An invite, or a message that contains one."""

    data: str = Field(default="", max_length=4096)
    columns: str = Field(default="", max_length=1024, pattern=r"^[^\x00]*$")
    name: str = Field(default="", max_length=64)
    rounds: int | None = Field(default=None, ge=1, le=10**6)


class JoinAnswer(StrictModel):
    """Consent to the question at which a job has ended."""

    job: str = Field(max_length=64)
    fingerprint: str | None = Field(default=None, pattern=r"^sha256:[0-9a-f]{64}$")
    accept: str | None = Field(default=None, pattern=r"^[a-z-]{1,32}:[0-9a-f]{32}$")
    accept_restore: bool = False
    invite: Invite = ""


class InviteText(StrictModel):
    invite: Invite


class HubRequest(StrictModel):
    server: Server


class LimitsRequest(StrictModel):
    """Limits of ``policy.yaml``."""

    hours: list[Annotated[str, Field(max_length=11)]] = Field(max_length=24)
    on_battery: Literal["train", "pause", "refuse"]


def routes(place: Workplace) -> APIRouter:
    """Create the routes under ``/join``."""
    router, jobs = APIRouter(), place.jobs

    def begin(words: list[str], invite: str) -> dict[str, Any]:
        if any(job.status == "running" for job in _join_jobs(jobs)):
            raise GymError(
                ErrorCode.STATE_LOCKED, "this machine is already joining or contributing", "stop it first"
            )
        env = {"GYM_INVITE": find_invite(invite)} if invite else {}
        return jobs.start(words, title="Join a hub", env=env).facts()

    @router.get("/join")
    def state(visitor: Looking) -> dict[str, Any]:
        """Return the newest join job, the agent's state, the home's hubs and receipts, and the data files."""
        job = next(iter(_join_jobs(jobs)), None)
        home = Home.open(place.home)
        return {
            "job": None if job is None else job.facts(),
            "agent": _agent(home, job),
            "files": place.files()[:MAX_FILES],
            "takes_any_path": place.takes_any_path,
            "invite": place.invite if visitor.role >= Role.OPERATOR else "",
            "link_problem": place.link_problem if visitor.role >= Role.OPERATOR else "",
            **_home(home),
        }

    @router.post("/join")
    def join(given: JoinRequest, visitor: Changing) -> dict[str, Any]:
        """Start `gym-client join`; without options, with those of the last join."""
        words = [*_JOIN, *place.options, "--json"]
        if given != JoinRequest():
            words.append("--no-wait")  # the user is waiting for the terms
        if given.server is not None:
            words.append(f"--server={given.server}")
        if given.data:
            words.append(f"--data={_data(place, given.data)}")
        if given.columns:
            words.append(f"--columns={given.columns}")
        if given.name:
            words.append(f"--name={plain(given.name)}")
        if given.rounds is not None:
            words.append(f"--rounds={given.rounds}")
        return begin(words, given.invite)

    @router.post("/join/invite")
    def read_invite(given: InviteText, visitor: Changing) -> dict[str, Any]:
        """Return the address and key of the hub in an invite; null if the text contains no complete invite.

        A partial invite is not an error, since the page asks while the user types. The text is in the body, since
        queries are logged.
        """
        try:
            invite = parse_invite(find_invite(given.invite))
        except GymError:
            return {"address": None, "fingerprint": None, "is_cut": INVITE_SCHEME in given.invite}
        return {
            "address": f"{invite.host}:{invite.port}",
            "fingerprint": invite.fingerprint,
            "is_cut": False,
        }

    @router.post("/join/answer")
    def answer(given: JoinAnswer, visitor: Changing) -> dict[str, Any]:
        """Accept the question at which a job has ended, and start the job that continues."""
        job = jobs.get(given.job)
        if job.command[:2] != _JOIN:
            raise GymError(ErrorCode.USAGE, f"job {job.id} does not join a hub")
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
    def account(server: AskedServer, visitor: Looking) -> dict[str, Any]:
        """Return the balance and verdicts on a hub, from `gym-client status`."""
        return _report(place, "status", server)

    @router.get("/join/rewards")
    def rewards(server: AskedServer, visitor: Looking) -> dict[str, Any]:
        """Return the scores and credits of each round on a hub, from `gym-client rewards`."""
        return _report(place, "rewards", server)

    @router.post("/join/leave")
    def leave(given: HubRequest, visitor: Changing) -> dict[str, Any]:
        """Start `gym-client leave`."""
        words = ["gym-client", "leave", *place.options, f"--server={given.server}", "--json"]
        return jobs.start(words, title=f"Leave {given.server}").facts()

    @router.post("/join/pause")
    def pause(visitor: Changing) -> dict[str, Any]:
        """Pause the home's agent, regardless of how it was started."""
        set_paused(Home.open(place.home))
        return {}

    @router.post("/join/resume")
    def resume(visitor: Changing) -> dict[str, Any]:
        """Resume the home's agent."""
        set_resumed(Home.open(place.home))
        return {}

    @router.post("/join/limits")
    def limits(given: LimitsRequest, visitor: Changing) -> dict[str, Any]:
        """Set the hours and the behaviour on battery in ``policy.yaml``."""
        policy = set_limits(Home.open(place.home), given.hours, given.on_battery)
        return {"hours": policy.hours, "on_battery": policy.on_battery}

    return router


def _join_jobs(jobs: Jobs) -> list[WebJob]:
    """List the newest jobs that join a hub, newest first."""
    return [job for job in jobs.list() if job.command[:2] == _JOIN][:_HUB_JOBS]


def _agent(home: Home, job: WebJob | None) -> dict[str, Any]:
    """Return the agent's state and the limits that the page sets (``LimitsRequest``).

    The state is whether the agent is paused, and the process that runs it if it was not started by this page. If
    ``policy.yaml`` is unreadable, the limits are missing, and ``problem`` contains the error message.
    """
    is_own = job is not None and job.status == "running"
    found = {"is_paused": is_paused(home), "elsewhere": None if is_own else _user_of(home)}
    try:
        policy = Policy.load(home.policy_path)
    except GymError as error:
        return {**found, "problem": error.message}
    return {**found, "hours": policy.hours, "on_battery": policy.on_battery, "policy_pause": policy.pause}


def _user_of(home: Home) -> int | None:
    """Return the id of the process that has the home's lock open; None if no agent uses it.

    The lock itself is not taken, since an agent that starts at that moment would fail.
    """
    lock = home.folder / "lock"
    try:
        process = psutil.Process(int(lock.read_text(encoding="ascii")[:20]))
        is_open = any(Path(file.path) == lock for file in process.open_files())
    except (OSError, ValueError, psutil.Error):
        return None
    return process.pid if is_open else None


def _data(place: Workplace, name: str) -> str:
    """Return the path of a data file in the form that a command needs; commands run in the folder.

    Raises:
        GymError: ``FILE_NOT_FOUND``; ``PERMISSION_DENIED`` for a path outside the folder, unless any path is allowed.
    """
    folder = place.folder.resolve()
    try:
        file = (folder / Path(name).expanduser()).resolve()
        exists = file.is_file()
    except (OSError, ValueError, RuntimeError):  # path too long, null character, or circular links
        file, exists = folder / "?", False
    if place.takes_any_path:
        shown = str(file)
    elif folder in file.parents:
        shown = str(file.relative_to(folder))
    else:
        raise GymError(
            ErrorCode.PERMISSION_DENIED,
            f"{plain(name, 200)!r} is not below {folder}",
            "start gym webui in the folder that contains it",
        )
    if not exists:
        raise GymError(ErrorCode.FILE_NOT_FOUND, f"no file {plain(name, 200)} in {folder}")
    return shown


def _home(home: Home) -> dict[str, Any]:
    """Return the home's hubs, its last settings and its receipts, without any keys."""
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
    """Return the ledger entry of a receipt, or the announced upload that it commits to, without its proof."""
    commitment: Any = receipt.get("commitment")
    if isinstance(commitment, dict) and isinstance(statement := commitment.get("statement"), dict):
        return {"server": receipt.get("server"), "kind": "upload", "at": statement.get("committed_at")}
    entry: Any = receipt.get("proof")
    entry = entry.get("entry") if isinstance(entry, dict) else None
    entry = entry if isinstance(entry, dict) else {}
    body = entry.get("body") if isinstance(entry.get("body"), dict) else {}
    named = ("server_round", "verdict", "update", "score", "error", "credit", "amount", "reason", "at")
    return {
        "server": receipt.get("server"),
        "sequence": entry.get("sequence"),
        "kind": entry.get("kind"),
        **{key: body[key] for key in named if isinstance(body.get(key), (str, int, float))},
    }


def _require_known(home: Home, server: str) -> None:
    """Reject a hub that was never joined from this home.

    Otherwise a viewer could make this machine connect to arbitrary addresses.

    Raises:
        GymError: ``NOT_FOUND`` for an unknown hub.
    """
    if all(pin.address != server for pin in with_account(home)):
        raise GymError(ErrorCode.NOT_FOUND, f"this machine has no account at {server}", "join it first")


@contextmanager
def without_reports() -> Iterator[None]:
    """Wait for the commands that ask hubs for accounts, which write into the home; start none in the block.

    Raises:
        GymError: ``BUSY`` if they do not end.
    """
    with ExitStack() as held:
        for _ in range(_MAX_REPORTS):
            if not _reports.acquire(timeout=_REPORT_SECONDS):
                raise GymError(ErrorCode.BUSY, "a hub is still asked for an account", "try again in a moment")
            held.callback(_reports.release)
        yield


def _report(place: Workplace, command: str, server: str) -> dict[str, Any]:
    """Return the report of a `gym-client` command about a hub.

    Raises:
        GymError: ``NOT_FOUND``; ``BUSY``; the error from the command.
    """
    if not _reports.acquire(blocking=False):
        raise GymError(
            ErrorCode.BUSY, "other pages are requesting accounts from hubs", "try again in a moment"
        )
    try:
        _require_known(Home.open(place.home), server)
        words = ["gym-client", command, *place.options, f"--server={server}"]
        report: dict[str, Any] = json_of(words, Path.home(), _REPORT_SECONDS)
    except GymError as error:
        if error.code in (ErrorCode.BUSY, ErrorCode.NOT_FOUND):
            raise
        if error.code is ErrorCode.DEADLINE_EXCEEDED:
            raise GymError(error.code, f"{server} does not answer", "is the hub running?") from error
        # All errors of the hub become status 503, since 401 and 403 would refer to the login of the page itself.
        raise GymError(ErrorCode.UNAVAILABLE, error.message, error.hint) from error
    finally:
        _reports.release()
    return report
