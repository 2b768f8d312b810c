"""The variants screen: totals for all visitors, and for the operator a list, takedowns and their reversal."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Query
from pydantic import Field
from sqlalchemy import func, select

from gym_fed.config.schema.base import StrictModel
from gym_fed.core.text import plain
from gym_fed.web.app import Changing, Looking, Operating
from gym_server.store.tables import variant_takedowns, variants
from gym_server.variants.variants import HubVariants
from gym_server.web.entries import names_of
from gym_server.web.hub_view import MAX_ROWS, HubView


class _Variant(StrictModel):
    owner: str = Field(min_length=1, max_length=100)
    name: str = Field(min_length=1, max_length=200)


class _Removal(_Variant):
    reason: str = Field(min_length=1, max_length=500)


def routes(view: HubView, hub_variants: HubVariants) -> APIRouter:
    """Return the route ``variants`` for all visitors, and the operator's ``variants/list`` with its changes.

    Names and readers are shown only to those who may read a variant (docs/variants.md), so viewers get counts.
    """
    found = APIRouter()

    @found.get("/variants")
    def counted(visitor: Looking) -> dict[str, Any]:
        """Return the number of variants and owners, and the total bytes."""
        held = variants.c.document.is_not(None)
        figures = select(
            func.count(),
            func.count(variants.c.owner.distinct()),
            func.coalesce(func.sum(variants.c.size_bytes), 0),
            func.coalesce(func.max(variants.c.size_bytes), 0),
        ).where(held)
        with view.state.database.reading() as tx:
            number, owners, total, largest = tx.execute(figures).one()
            down = int(tx.scalar(select(func.count()).select_from(variant_takedowns)) or 0)
        return {
            "enabled": view.config.variants.enabled,
            "number": number,
            "owners": owners,
            "bytes": int(total),
            "largest_bytes": int(largest),
            "taken_down": down,
            "is_operator": view.is_operator(visitor),
            "may_change": view.may_change(visitor),
        }

    @found.get("/variants/list")
    def listed(
        visitor: Operating,
        after: Annotated[str, Query(max_length=400)] = "",
        limit: Annotated[int, Query(ge=1, le=100)] = 50,
    ) -> dict[str, Any]:
        """Return a page of variants, and those that were taken down."""
        held, following = hub_variants.page(None, after, limit)
        newest = select(variant_takedowns).order_by(variant_takedowns.c.owner, variant_takedowns.c.name)
        with view.state.database.reading() as tx:
            down = tx.execute(newest.limit(MAX_ROWS)).all()
            owners = {one.signed.manifest.owner for one in held} | {row.owner for row in down}
            names = names_of(tx, sorted(owners))
        return {
            "next": following,
            "variants": [
                {
                    "owner": one.signed.manifest.owner,
                    "owner_name": names.get(one.signed.manifest.owner, ""),
                    "name": one.signed.manifest.variant,
                    "revision": one.signed.manifest.revision,
                    "base": one.base,
                    "bytes": one.signed.manifest.size_bytes,
                    "readers": "everyone" if "*" in one.readers else len(one.readers),
                    "key_status": one.key_status,
                    "put_at": one.put_at,
                    "ledger_sequence": one.ledger_sequence,
                }
                for one in held
            ],
            "taken_down": [
                {
                    "owner": row.owner,
                    "owner_name": names.get(row.owner, ""),
                    "name": row.name,
                    "reason": row.reason,
                }
                for row in down
            ],
        }

    @found.post("/variants/remove")
    def remove(visitor: Changing, given: _Removal) -> dict[str, Any]:
        """Take a variant down; return what was removed."""
        view.require_running()
        return hub_variants.remove(given.owner, given.name, "coordinator", plain(given.reason, 500))

    @found.post("/variants/allow")
    def allow(visitor: Changing, given: _Variant) -> dict[str, Any]:
        """Allow the owner to upload a variant again."""
        view.require_running()
        hub_variants.allow(given.owner, given.name)
        return {"owner": given.owner, "variant": given.name, "allowed": True}

    return found
