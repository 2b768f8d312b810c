"""The read-only part of ``gym.fed.v1.Hub`` that a mirror serves; calls that write return UNIMPLEMENTED."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator
from typing import Any

from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.core.text import counted, whole_number
from gym_fed.trust.identity.variant import SignedVariant
from gym_fed.trust.mirrors.folder import MirrorContent, MirrorFolder
from gym_fed.trust.wire.protocol import require_contributor
from gym_fed.trust.wire.v1 import hub_pb2 as pb
from gym_server.mirror.accounts import MirrorAccounts
from gym_server.mirror.record import MirrorRecord
from gym_server.rpc.auth_interceptor import current_session
from gym_server.rpc.calls import entry_message
from gym_server.rpc.transfers import read_ahead

log = logging.getLogger("gym_server")

_MAX_PAGE = 100


class MirrorService:
    """Serves a mirror's folder; ``refresh`` loads what the follower process has verified since.

    Args:
        folder: The mirror's folder.
        accounts: Verifies logins.
    """

    def __init__(self, folder: MirrorFolder, accounts: MirrorAccounts) -> None:
        self._folder, self._accounts = folder, accounts
        self._content: MirrorContent | None = None
        self._record: MirrorRecord | None = None
        self._variants: list[tuple[str, str, pb.VariantInfo]] = []
        self._problem = ""

    @property
    def content(self) -> MirrorContent | None:
        """The state that is being served."""
        return self._content

    def refresh(self) -> None:
        """Reload the folder; after an error, which is logged, the previous content is still served."""
        try:
            content = self._folder.content()
            if content is None or content == self._content:
                return
            record = self._record
            if record is None:
                self._accounts.begin(content.server)
                key, path = bytes.fromhex(content.ledger_key), self._folder.ledger_path(content.server)
                record = MirrorRecord(path, key, self._accounts.add)
            record.read(content.entries)
            self._variants = sorted((_read_variant(text) for text in content.variants), key=lambda v: v[:2])
            if content.halted and not (self._content and self._content.halted):
                log.error(
                    "the hub is no longer followed; content verified so far is served: %s", content.halted
                )
            self._record, self._content = record, content
        except (GymError, OSError, ValueError) as error:
            if str(error) != self._problem:
                self._problem = str(error)
                log.error("the mirror's folder could not be read again: %s", error)

    async def Status(self, request: pb.StatusRequest, context: Any) -> pb.StatusReply:
        """Refuse the call, so that a client does not mistake the mirror for a hub and sign statements for it."""
        hub = "its hub" if self._content is None else self._content.hub
        raise GymError(
            ErrorCode.USAGE, f"this is a mirror of {hub}, which does not accept updates", f"use {hub}"
        )

    async def Authenticate(self, request: pb.AuthenticateRequest, context: Any) -> pb.AuthenticateReply:
        require_contributor(request.protocol)
        token, seconds = self._accounts.authenticate(request)
        return pb.AuthenticateReply(session=token, expires_at_seconds=int(time.time() + seconds))

    async def Download(self, request: pb.DownloadRequest, context: Any) -> AsyncIterator[pb.DownloadChunk]:
        content = self._served()
        size = content.objects.get(request.sha256)
        if size is None:
            raise GymError(ErrorCode.NOT_FOUND, f"this mirror has no object {request.sha256[:80]}")
        if request.offset > size:
            raise GymError(
                ErrorCode.USAGE, f"offset {request.offset} is beyond the object's {counted(size, 'byte')}"
            )
        yield pb.DownloadChunk(size_bytes=size)
        async for data in read_ahead(self._folder.objects / request.sha256, request.offset):
            yield pb.DownloadChunk(data=data)

    async def Ledger(self, request: pb.LedgerRequest, context: Any) -> AsyncIterator[pb.LedgerEntry]:
        entries = self._ledger().entries(max(1, request.from_sequence))
        while (entry := await asyncio.to_thread(next, entries, None)) is not None:
            yield entry_message(entry)

    async def LedgerHeads(self, request: pb.LedgerHeadsRequest, context: Any) -> AsyncIterator[pb.LedgerHead]:
        for head in tuple(self._ledger().heads):
            if head.size >= request.from_size:
                yield pb.LedgerHead(head_json=head.to_json())

    async def LedgerProof(self, request: pb.LedgerProofRequest, context: Any) -> pb.LedgerProofReply:
        proof = await asyncio.to_thread(self._ledger().proof, request.sequence, request.size)
        entry, head = entry_message(proof.entry), proof.head.to_json()
        return pb.LedgerProofReply(entry=entry, head_json=head, path=proof.path)

    async def GetVariant(self, request: pb.GetVariantRequest, context: Any) -> pb.VariantInfo:
        owner_and_name = (request.owner or current_session().contributor, request.name)
        self._served()
        for owner, name, info in self._variants:
            if (owner, name) == owner_and_name:
                return info
        raise GymError(ErrorCode.NOT_FOUND, f"this mirror has no public variant {request.name[:80]!r}")

    async def ListVariants(self, request: pb.ListVariantsRequest, context: Any) -> pb.ListVariantsReply:
        """Return a page of the public variants; the page token is the index of its first variant."""
        self._served()
        start = whole_number(request.page) or 0
        end = start + min(request.page_size or _MAX_PAGE, _MAX_PAGE)
        found = [info for _, _, info in self._variants[start:end]]
        return pb.ListVariantsReply(variants=found, next_page=str(end) if end < len(self._variants) else "")

    def _served(self) -> MirrorContent:
        if self._content is None:
            raise GymError(
                ErrorCode.UNAVAILABLE, "this mirror has verified nothing yet", "use the hub, or wait"
            )
        return self._content

    def _ledger(self) -> MirrorRecord:
        self._served()
        assert self._record is not None
        return self._record


def _read_variant(text: str) -> tuple[str, str, pb.VariantInfo]:
    info = pb.VariantInfo.FromString(bytes.fromhex(text))
    manifest = SignedVariant.parse(info.variant_json).manifest
    return manifest.owner, manifest.variant, info
