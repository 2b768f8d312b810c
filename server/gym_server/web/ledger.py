"""The ledger screen: entries, the newest signed head, inclusion proofs, and the entire ledger as a file.

Anybody who can reach the hub's port can get every proof and therefore every entry. Confidential content is sealed or
not in the ledger, so viewers see entries unchanged.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Annotated, Any

from fastapi import APIRouter, Query
from sqlalchemy import func, select
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.trust.ledger.entries import Entry
from gym_fed.trust.ledger.export import first_line, lines
from gym_fed.trust.ledger.heads import EntryProof
from gym_fed.trust.ledger.merkle import inclusion_steps, leaf_hash
from gym_fed.web.app import Looking, caller_network
from gym_server.ledger.rows import entry_of
from gym_server.store.tables import accounts, ledger, ledger_subjects
from gym_server.web.hub_view import HubView

MAX_BODY_BYTES = 2000
"""Maximum size of an entry's body in a list, in bytes; a larger body is omitted and fetched separately."""
MAX_DOWNLOADS = 8
"""Maximum number of simultaneous downloads of the entire ledger, one per address: a reader may be slow without end."""
_CHUNK_BYTES = 256 * 2**10


def routes(view: HubView) -> APIRouter:
    """Return the routes ``ledger``, ``ledger/{sequence}`` with its proof, and ``ledger/export``."""
    found = APIRouter()
    downloads: set[str] = set()

    @found.get("/ledger")
    def listed(
        visitor: Looking,
        before: Annotated[int, Query(ge=0, le=2**53)] = 0,
        limit: Annotated[int, Query(ge=1, le=200)] = 50,
        kind: Annotated[str, Query(max_length=60)] = "",
        contributor: Annotated[str, Query(max_length=80)] = "",
    ) -> dict[str, Any]:
        """Return a page of entries below ``before``, by kind or contributor, and the newest signed head."""
        query = select(ledger).order_by(ledger.c.sequence.desc()).limit(limit + 1)
        if before:
            query = query.where(ledger.c.sequence < before)
        if kind:
            query = query.where(ledger.c.kind == kind)
        if contributor:
            of = ledger_subjects.c.contributor == contributor
            query = query.join(ledger_subjects, ledger_subjects.c.sequence == ledger.c.sequence).where(of)
        counted = select(ledger.c.kind, func.count()).group_by(ledger.c.kind).order_by(ledger.c.kind)
        with view.state.database.reading() as tx:
            rows = tx.execute(query).all()
            kinds = [{"kind": name, "count": count} for name, count in tx.execute(counted)]
            # the names of all contributors that the listed entries are about
            about = select(ledger_subjects.c.contributor).where(
                ledger_subjects.c.sequence.in_([row.sequence for row in rows])
            )
            named = select(accounts.c.contributor, accounts.c.name).where(accounts.c.contributor.in_(about))
            names = {row.contributor: row.name for row in tx.execute(named)}
        head = view.state.ledger.newest_head()
        return {
            "server": view.state.server,
            "public_key": view.state.ledger.public_key.hex(),
            "head": head and head.to_dict(),
            "total": sum(one["count"] for one in kinds),
            "kinds": kinds,
            "entries": [_shown(entry_of(row)) for row in rows[:limit]],
            "next": rows[limit - 1].sequence if len(rows) > limit else None,
            "names": names,
        }

    @found.get("/ledger/export")
    async def export(request: Request, visitor: Looking) -> Response:
        """Return the file that `gym-server ledger export` writes, up to the newest head."""
        head = await run_in_threadpool(view.state.ledger.newest_head)
        if head is None:
            raise GymError(
                ErrorCode.NOT_FOUND,
                "the ledger has no entry yet",
                "the first contributor's enrolment writes one",
            )
        address = caller_network(request)
        if address in downloads or len(downloads) >= MAX_DOWNLOADS:
            raise GymError(
                ErrorCode.BUSY,
                "other downloads of the ledger are in progress",
                "try again when one has finished",
            )
        downloads.add(address)
        name = f"{view.state.server}-{head.size}.jsonl"
        return _Download(_file(view, head.size), lambda: downloads.discard(address), name)

    @found.get("/ledger/{sequence}")
    def proof(visitor: Looking, sequence: int) -> dict[str, Any]:
        """Return an entry with its proof under a head, and the values that a reader can recompute."""
        if not 1 <= sequence <= 2**53:
            raise GymError(ErrorCode.NOT_FOUND, f"the ledger has no entry {sequence}")
        proven = view.state.ledger.proof(sequence)
        return {
            "proof": proven.to_dict(),
            "body": proven.entry.body_json,
            "public_key": view.state.ledger.public_key.hex(),
            "check": _check(proven, view.state.ledger.public_key),
        }

    return found


def _shown(entry: Entry) -> dict[str, Any]:
    size = len(entry.body_json.encode())
    body = entry.body if size <= MAX_BODY_BYTES else None
    return {
        "sequence": entry.sequence,
        "kind": entry.kind,
        "hash": entry.hash,
        "body": body,
        "body_bytes": size,
        "at": entry.body.get("at"),
        "at_bucket_seconds": entry.body.get("at_bucket_seconds"),
        "server_round": entry.body.get("server_round"),
    }


def _check(proven: EntryProof, public_key: bytes) -> dict[str, Any]:
    """Return the steps of the verification, with all intermediate values, so that a reader can repeat it."""
    head, sequence = proven.head, proven.entry.sequence
    try:
        proven.verify(public_key)
        problem = ""
    except GymError as error:
        problem = error.message
    is_own = head.size == sequence and not proven.path
    steps = [] if is_own else inclusion_steps(proven.entry.hash, sequence - 1, head.size, proven.path)
    return {
        "valid": not problem,
        "problem": problem,
        "is_own_head": is_own,
        "leaf": leaf_hash(proven.entry.hash).hex(),
        "steps": [{"side": side, "sibling": sibling, "node": node} for side, sibling, node in steps],
        "root": head.head.root,
    }


def _file(view: HubView, size: int) -> Iterator[bytes]:
    """Yield the content of `gym-server ledger export`, in chunks."""
    book = view.state.ledger
    entries = (entry for entry in book.entries() if entry.sequence <= size)
    heads = (head for head in book.heads() if head.size <= size)
    waiting = [first_line(book.public_key)]
    length = 0
    for line in lines(entries, heads):
        waiting.append(line)
        length += len(line)
        if length >= _CHUNK_BYTES:
            yield ("\n".join(waiting) + "\n").encode()
            waiting, length = [], 0
    if waiting:
        yield ("\n".join(waiting) + "\n").encode()


class _Download(StreamingResponse):
    """A download of the ledger that always releases its slot at the end."""

    def __init__(self, content: Iterator[bytes], release: Callable[[], None], name: str) -> None:
        disposition = {"Content-Disposition": f'attachment; filename="{name}"'}
        super().__init__(content, media_type="application/x-ndjson", headers=disposition)
        self._release = release

    async def __call__(self, *arguments: Any) -> None:
        try:
            await super().__call__(*arguments)
        finally:
            self._release()
