"""The invites screen, for the operator only: create, list and cancel invites."""

from __future__ import annotations

from typing import Annotated, Any

import segno
from fastapi import APIRouter, Query
from pydantic import Field
from sqlalchemy import func, select

from gym_fed.config.schema.base import StrictModel
from gym_fed.web.app import Changing, Operating
from gym_server.accounts.accounts import Accounts
from gym_server.accounts.invitations import MAX_NOTE, cancel_invites, invites_of, make_invites
from gym_server.store.tables import invites
from gym_server.web.entries import names_of
from gym_server.web.hub_view import HubView


class _NewInvite(StrictModel):
    note: str = Field(default="", max_length=MAX_NOTE)
    valid_hours: float = Field(default=168.0, ge=0.01, le=8760)


def routes(view: HubView, accounts: Accounts, fingerprint: str) -> APIRouter:
    """Return the routes under ``invites``, which list, create and cancel invites as `gym-server invites` does."""
    found = APIRouter()

    @found.get("/invites")
    def listed(
        visitor: Operating,
        offset: Annotated[int, Query(ge=0, le=10**9)] = 0,
        limit: Annotated[int, Query(ge=1, le=200)] = 50,
    ) -> dict[str, Any]:
        """Return a page of invites, newest first, without the tokens."""
        with view.state.database.reading() as tx:
            total = int(tx.scalar(select(func.count()).select_from(invites)) or 0)
            shown = invites_of(view.state.database, view.state.clock, offset, limit)
            names = names_of(tx, [one["used_by"] for one in shown if one["used_by"]])
        return {
            "total": total,
            "policy": view.config.enrolment.policy,
            "may_change": view.may_change(visitor),
            "invites": [{**one, "used_by_name": names.get(one["used_by"] or "", "")} for one in shown],
        }

    @found.post("/invites")
    def create(visitor: Changing, given: _NewInvite) -> dict[str, Any]:
        """Create an invite. Only this response contains the token, of which the hub stores the hash."""
        view.require_running()
        (made,) = make_invites(
            view.config, view.state.folder, accounts, fingerprint, [given.note], given.valid_hours * 3600
        )
        return {**made, "valid_hours": given.valid_hours, "code": qr_rows(made["invite"])}

    @found.delete("/invites/{invite}")
    def cancel(visitor: Changing, invite: str) -> dict[str, Any]:
        """Cancel an open invite; return its id."""
        view.require_running()
        return {"cancelled": cancel_invites(view.state.database, view.state.clock, [invite])}

    return found


def qr_rows(text: str) -> list[str]:
    """Return a QR code as rows of ``0`` and ``1`` (a dark module), without its quiet zone."""
    return ["".join(str(int(bool(module))) for module in row) for row in segno.make_qr(text).matrix]
