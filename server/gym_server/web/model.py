"""The model screen: the chain of versions with digests, sizes and scores, and answers of the newest version."""

from __future__ import annotations

import json
import threading
from typing import Annotated, Any

from fastapi import APIRouter, Query, Request
from pydantic import Field
from sqlalchemy import Connection, func, select
from starlette.responses import StreamingResponse

from gym_fed.config.hub.task import bytes_to_join, next_digest
from gym_fed.config.schema.base import StrictModel
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.trust.ledger.evaluations import EVALUATED
from gym_fed.web.access import Visitor
from gym_fed.web.app import Changing, Looking, caller_network, changing
from gym_fed.web.model_server import stream_answer
from gym_server.evaluations.groups import saved_sentence
from gym_server.rounds.versions import base_loss, head_of, soups_to
from gym_server.store.tables import accounts, ledger, updates, versions
from gym_server.web.hub_view import HubView
from gym_server.web.newest_model import NewestModel

MAX_POINTS = 2000
"""Maximum number of versions in a chart; the newest are shown."""
MAX_EVALUATIONS = 500
"""Maximum number of evaluations in a chart; the newest are shown."""
MAX_TASKS = 200
"""Maximum number of curves in one response."""
MAX_ANSWER_TOKENS = 512
"""Maximum length of an answer to a question, in tokens."""
MAX_QUESTIONS = 6
"""Maximum number of questions per minute, over all viewers."""
MAX_HELPERS = 50
"""Maximum number of named contributors of one version; ``num_updates`` counts all."""


class AskedQuestion(StrictModel):
    """A visitor's question, which is neither stored nor logged."""

    prompt: str = Field(min_length=1, max_length=4000)


def routes(view: HubView) -> APIRouter:
    """Return the routes ``model`` (a page of versions), ``model/figures`` (chart data) and ``model/newest``."""
    found = APIRouter()

    @found.get("/model")
    def listed(
        visitor: Looking,
        offset: Annotated[int, Query(ge=0, le=10**9)] = 0,
        limit: Annotated[int, Query(ge=1, le=200)] = 25,
    ) -> dict[str, Any]:
        """Return a page of versions, newest first, with the digests of their parents."""
        return page_of_versions(view, visitor, offset, limit)

    @found.get("/model/figures")
    def figures(visitor: Looking) -> dict[str, Any]:
        """Return held-out losses as ``[height, after]`` from version 0 on, and a curve for each task of the gate."""
        newest = select(versions.c.height, versions.c.heldout_before, versions.c.heldout_after)
        with view.state.database.reading() as tx:
            rows = tx.execute(newest.order_by(versions.c.height.desc()).limit(MAX_POINTS)).all()[::-1]
            evaluations, base = _evaluations(tx, view.state.base.digest), base_loss(tx)
        start = [] if base is None else [[0, base]]
        known = [[row.height, row.heldout_after] for row in rows if row.heldout_after is not None]
        return {
            "heldout": [*start, *known],
            "evaluations": evaluations,
            "is_measured": view.is_measured,
        }

    @found.get("/model/newest")
    def newest(visitor: Looking) -> dict[str, Any]:
        """Return the newest version's answers, and its progress."""
        return _newest_facts(view, visitor)

    questions = QuestionLimit()

    @found.post("/model/newest/ask")
    def ask(given: AskedQuestion, request: Request, visitor: Looking) -> StreamingResponse:
        """Stream the newest version's answer to an operator, or to a viewer if the hub allows it."""
        if _may_ask(view, visitor):
            questions.take(view.state.clock.now(), caller_network(request))
        else:
            changing(request)
        model = _require_newest(view)
        server = model.ready()
        path, body = model.request(given.prompt, MAX_ANSWER_TOKENS, streamed=True)
        return StreamingResponse(
            stream_answer(server.url + path, server.key, body),
            media_type="text/event-stream",
            headers={"X-Accel-Buffering": "no"},
        )

    @found.post("/model/newest/again")
    def again(visitor: Changing) -> dict[str, Any]:
        """Restart the newest version's server after a failure."""
        _require_newest(view).again()
        return {}

    return found


def page_of_versions(view: HubView, visitor: Visitor, offset: int, limit: int) -> dict[str, Any]:
    """Return ``limit`` versions after the ``offset`` newest ones, and the facts of the newest version."""
    newest = select(versions).order_by(versions.c.height.desc())
    with view.state.database.reading() as tx:
        total = int(tx.scalar(select(func.count()).select_from(versions)) or 0)
        rows = tx.execute(newest.offset(offset).limit(limit)).all()
        of_rounds = [row.server_round for row in rows]
        current = head_of(tx, view.state.base.digest)
        sums = view.state.round_store.sums.read(tx)
        soups = soups_to(tx, current.height, sums)
        parents = _digests(tx, [row.parent for row in rows])
        groups = saved_sentence(tx)
        helpers = _helpers(tx, of_rounds)
        up = None if view.is_sealed_from(visitor) else _uploaded(tx, of_rounds)
    shown = [(row, parents.get(row.parent, view.state.base.digest)) for row in rows]
    leading = {soup.version_digest for soup in soups}
    return {
        "base_model": view.config.public_base_name,
        "base_digest": view.state.base.digest,
        "num_parameters": view.state.base.num_parameters,
        "version": current.height,
        "total": total,
        "num_soups": len(soups),
        "soups_bytes": bytes_to_join(soups),
        "groups": groups,
        "round_bytes": soups[-1].size_bytes if soups else 0,
        "newest": _newest_facts(view, visitor),
        "chain_is_whole": all(
            next_digest(parent, row.soup_sha256, row.server_round, sums.get(row.height, {}).get("digest"))
            == row.digest
            for row, parent in shown
        ),
        "versions": [
            {
                "height": row.height,
                "digest": row.digest,
                "parent": parent,
                "is_abandoned": row.digest not in leading,
                "soup": row.soup_sha256,
                "server_round": row.server_round,
                "soup_bytes": row.soup_bytes,
                "uploaded_bytes": None if up is None else up.get(row.server_round, 0),
                "num_updates": row.num_updates,
                "merged_from": helpers.get(row.server_round, []),
                "heldout_before": row.heldout_before,
                "heldout_after": row.heldout_after,
                "committed_at": view.moment(visitor, row.committed_at),
            }
            for row, parent in shown
        ],
    }


def _newest_facts(view: HubView, visitor: Visitor) -> dict[str, Any]:
    """Return the newest version's answers, for visitors who may have the model.

    Every account can download the soups, so answers are public if anybody may enrol, and only for operators otherwise.
    """
    if view.newest is None:
        return {"is_on": False}
    is_operator, may_ask = view.is_operator(visitor), _may_ask(view, visitor)
    if not is_operator and view.config.enrolment.policy != "open":
        return {"is_on": True, "is_hidden": True}
    return {
        "is_on": True,
        "is_hidden": False,
        "may_ask": may_ask or is_operator,
        **view.newest.facts(is_operator),
    }


def _may_ask(view: HubView, visitor: Visitor) -> bool:
    """Return True if viewers may ask the newest version; operators always may."""
    pages = view.config.dashboard
    is_open = view.config.enrolment.policy == "open"
    return pages is not None and pages.ask_by == "viewers" and is_open and not view.is_operator(visitor)


class QuestionLimit:
    """A rate limit on the questions of all viewers together, since every answer is computed on the hub's machine.

    Viewers of one network get half of them, so that one of them never takes all.
    """

    def __init__(self) -> None:
        self._at: list[tuple[float, str]] = []
        self._lock = threading.Lock()

    def take(self, now: float, network: str) -> None:
        """Count a question.

        Args:
            now: The hub's time in seconds.
            network: The network of the viewer.

        Raises:
            GymError: ``BUSY`` after ``MAX_QUESTIONS`` within a minute, or half of them from the same network.
        """
        with self._lock:
            self._at = [(at, other) for at, other in self._at if now - 60 < at <= now]
            own = sum(other == network for _, other in self._at)
            if len(self._at) >= MAX_QUESTIONS or own >= MAX_QUESTIONS // 2:
                raise GymError(ErrorCode.BUSY, "too many questions to this model", "ask again in a minute")
            self._at.append((now, network))


def _require_newest(view: HubView) -> NewestModel:
    """Return the server of the newest version.

    Raises:
        GymError: ``UNAVAILABLE`` if the newest version is not served.
    """
    if view.newest is None:
        raise GymError(
            ErrorCode.UNAVAILABLE,
            "this hub does not answer questions",
            "set dashboard: {ask: true} in gym-server.yaml, and restart the hub",
        )
    return view.newest


def _digests(tx: Connection, heights: list[int]) -> dict[int, str]:
    """Return the digests of versions by height; the base is not included."""
    query = select(versions.c.height, versions.c.digest).where(versions.c.height.in_(heights))
    return {row.height: row.digest for row in tx.execute(query)}


def _helpers(tx: Connection, of_rounds: list[int]) -> dict[int, list[dict[str, str]]]:
    """Return the contributors of the merged updates by round, sorted by name."""
    number = updates.c.server_round
    query = (
        select(number, updates.c.contributor, accounts.c.name)
        .outerjoin(accounts, accounts.c.contributor == updates.c.contributor)
        .where(number.in_(of_rounds), updates.c.verdict == "merged")
        .order_by(accounts.c.name, updates.c.contributor)
    )
    found: dict[int, list[dict[str, str]]] = {}
    for server_round, contributor, name in tx.execute(query):
        helpers = found.setdefault(server_round, [])
        if len(helpers) < MAX_HELPERS:
            helpers.append({"contributor": contributor, "name": name or contributor})
    return found


def _uploaded(tx: Connection, of_rounds: list[int]) -> dict[int, int]:
    """Return the total size of the merged updates by round, in bytes."""
    number = updates.c.server_round
    query = select(number, func.sum(updates.c.delta_bytes)).where(
        number.in_(of_rounds), updates.c.verdict == "merged"
    )
    return {server_round: int(total) for server_round, total in tx.execute(query.group_by(number))}


def _evaluations(tx: Connection, base_digest: str) -> list[dict[str, Any]]:
    """Return the gate's results for each committed version, with a curve per suite and task.

    A curve begins with version 0 if it was evaluated, otherwise with the parent of the first evaluated version.
    """
    evaluated = select(ledger.c.body).where(ledger.c.kind == EVALUATED)
    bodies = tx.scalars(evaluated.order_by(ledger.c.sequence.desc()).limit(MAX_EVALUATIONS)).all()[::-1]
    first = tx.scalars(evaluated.order_by(ledger.c.sequence).limit(1)).all()
    bodies = bodies if bodies[:1] == first else [*first, *bodies]
    parents = dict(tx.execute(select(versions.c.height, versions.c.parent)).tuples().all())
    curves: dict[tuple[str, str], dict[str, Any]] = {}
    for body in map(json.loads, bodies):
        height, is_first = body.get("height"), body.get("parent") == base_digest
        if height is None and not is_first:
            continue  # rolled back
        for suite in body["suites"]:
            for name, task in suite["tasks"].items():
                key = (suite["suite"], name)
                if key not in curves and len(curves) >= MAX_TASKS:
                    continue
                empty = {"suite": key[0], "task": name, "metric": task["metric"], "points": []}
                points = curves.setdefault(key, empty)["points"]
                if not points:
                    points.append([0 if is_first else parents.get(height, 0), task["before"], None])
                if height is not None:
                    points.append([height, task["after"], task.get("after_stderr")])
    return list(curves.values())
