"""The hub's gRPC service: one short method per call of `hub.proto`, which delegates to the parts of the federation.

Database and file work runs on threads, off the event loop. Data is on disk before it is acknowledged.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator
from functools import partial
from typing import Any

from sqlalchemy import Connection, select

from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.core.failpoints import failpoint
from gym_fed.core.text import counted, plain, whole_number
from gym_fed.core.tracing import round_span
from gym_fed.trust.identity.manifest import UpdateManifest
from gym_fed.trust.wire.limits import KEEPALIVE_SECONDS
from gym_fed.trust.wire.references import references
from gym_fed.trust.wire.v1 import hub_pb2 as pb
from gym_server.accounts.accounts import Session
from gym_server.base.served import ServedBase
from gym_server.federation import RUN_ID, Federation
from gym_server.observe.tracing import LeaseSpans, caller_of, upload_span
from gym_server.privacy import budget as privacy
from gym_server.rewards.reputations import rewards_of
from gym_server.rounds.admission import Receipt, UpdateSubmission
from gym_server.rounds.answers import answered_differently, is_answered
from gym_server.rounds.commitments import Commitments
from gym_server.rounds.downloads import Downloads
from gym_server.rounds.queue import SET_ASIDE, QueuedMessage, check_held, record_reply
from gym_server.rounds.replies import MAX_REASON, MAX_RECORDS_BYTES, check_reply
from gym_server.rounds.steering import PAUSED, RESUMED
from gym_server.rounds.sums import CombinedSoups, being_made
from gym_server.rpc.auth_interceptor import current_session
from gym_server.rpc.calls import CallsBesideRounds, verdict_line
from gym_server.rpc.limits import EnrolmentLimits
from gym_server.rpc.streams import Wakeups, WorkStreams, wait_for_event
from gym_server.rpc.threads import heavily
from gym_server.rpc.transfers import Transfers, read_ahead
from gym_server.seeding.public import tracker_of
from gym_server.store.rights import require_stored
from gym_server.store.tables import accounts, credits, messages, updates

log = logging.getLogger("gym_server")

_SOUP_SECONDS = 5.0
"""Maximum time for which a call waits for a combined soup, in seconds."""


class Hub(CallsBesideRounds):
    """The hub's gRPC service; a ``GymError`` is converted to a status and trailer by the interceptor."""

    def __init__(self, federation: Federation, wakeups: Wakeups) -> None:
        self._state, self._live_config = federation.state, federation.live_config
        self._queue, self._admission = federation.queue, federation.admission
        self._accounts, self._keys = federation.accounts, federation.keys
        self._payouts, self._steering = federation.payouts, federation.steering
        self._variants, self._contributor_clocks = federation.variants, federation.contributor_clocks
        self._max_update_bytes, self._ledger_key = federation.max_update_bytes, federation.key
        self._wakeups, self._lease_spans = wakeups, LeaseSpans(federation.server)
        self._downloads = Downloads(federation.live_config, federation.base, federation.round_store)
        self.base = ServedBase(federation.config, federation.base, federation.database)
        self._seeds, self._traffic = tracker_of(federation, self.base), federation.traffic
        self._enrolments = EnrolmentLimits(
            federation.config.limits.enrolments_per_minute, federation.config.enrolment.policy == "open"
        )
        config = federation.config
        private = config.privacy is not None or config.variants.enabled
        self._transfers = Transfers(
            federation.database,
            federation.store,
            federation.max_update_bytes,
            private,
            config.limits,
            config.storage,
            federation.clock.now,
        )
        self._commitments = Commitments(federation.key, federation.server, federation.clock.now)
        self.combined_soups = CombinedSoups(federation.state, federation.config)
        self.finished = asyncio.Event()
        self._streams = WorkStreams(
            federation.database,
            federation.queue,
            wakeups,
            config.limits.streams_per_account,
            self.finished.is_set,
        )

    # ---- work ----

    async def Work(self, request: pb.WorkRequest, context: Any) -> AsyncIterator[pb.WorkEvent]:
        """Stream tasks to a node; after a reconnect, the first one is the task that the node still holds.

        The task is looked up at every wake-up, since an older, disconnected stream of the node may have leased a task
        that nobody received.
        """
        session = current_session()
        async with self._streams.opened(session) as stream:
            stream.woken.set()
            while True:
                if not await wait_for_event(stream.woken, KEEPALIVE_SECONDS):
                    yield pb.WorkEvent(keep_alive=pb.KeepAlive())
                    continue
                stream.woken.clear()
                if stream.ended is not None:
                    raise stream.ended
                said, task = await asyncio.to_thread(self._next_of, session)
                if said != stream.notice:
                    stream.notice = said
                    notice = pb.Notice(kind=PAUSED if said else RESUMED, message=said or "the pause is over")
                    yield pb.WorkEvent(notice=notice)
                if task is not None and task.message_id != stream.task:
                    stream.task = task.message_id
                    yield self._task(task)
                if self.finished.is_set() and not await asyncio.to_thread(self._queue.held, session.node_id):
                    hub = self._live_config.current, self._state.database, self._state.round_store
                    why = await asyncio.to_thread(privacy.end_of_run, *hub)
                    yield pb.WorkEvent(finished=pb.Finished(message=why))
                    return

    def _next_of(self, session: Session) -> tuple[str, QueuedMessage | None]:
        """Return the pause as text and the node's task, leasing the next one if the node has none."""
        self._accounts.check(session)
        pause = self._steering.paused()
        message = self._queue.held(session.node_id)
        if message is None and (message := self._queue.lease(session.node_id)):
            self._lease_spans.granted(message.message_id)
        return str(pause) if pause else "", message

    def _task(self, message: QueuedMessage) -> pb.WorkEvent:
        metadata = pb.MessageMetadata(
            run_id=RUN_ID,
            dst_node_id=message.node_id,
            src_node_id=1,
            group_id=message.group_id,
            created_at_seconds=message.created_at,
            ttl_seconds=message.ttl_seconds,
            message_type=message.message_type,
        )
        return pb.WorkEvent(
            task=pb.Task(
                message_id=message.message_id,
                lease_seconds=self._queue.lease_seconds,
                metadata=metadata,
                content=pb.Records.FromString(message.content),
            )
        )

    async def Heartbeat(self, request: pb.HeartbeatRequest, context: Any) -> pb.HeartbeatReply:
        session = current_session()
        progress = f"{plain(request.phase, 16)} {request.done}/{request.total}"
        await asyncio.to_thread(self._queue.renew, request.message_id, session.node_id, progress)
        return pb.HeartbeatReply(lease_seconds=self._queue.lease_seconds)

    # ---- objects ----

    async def BeginUpload(self, request: pb.BeginUploadRequest, context: Any) -> pb.UploadState:
        return await asyncio.to_thread(self._begin_upload, current_session().contributor, request)

    def _begin_upload(self, contributor: str, request: pb.BeginUploadRequest) -> pb.UploadState:
        signed: list[str] = []

        def commit(tx: Connection) -> None:
            signed.append(self._commitments.commit(tx, contributor, request.sha256))

        state = self._transfers.begin(contributor, request.sha256, request.size_bytes, commit)
        state.commitment_json = signed[-1]
        return state

    async def Upload(self, chunks: AsyncIterator[pb.UploadChunk], context: Any) -> pb.UploadState:
        session = current_session()
        check = partial(self._accounts.check, session)
        async with upload_span(self._state.server, self._state.round_store, context):
            return await self._transfers.receive(session.contributor, chunks, check)

    async def Download(self, request: pb.DownloadRequest, context: Any) -> AsyncIterator[pb.DownloadChunk]:
        contributor = current_session().contributor
        path = self.base.path_of(request.sha256)
        if path is None:
            path = await asyncio.to_thread(self._transfers.readable, contributor, request.sha256)
        size = path.stat().st_size
        if request.offset > size:
            raise GymError(
                ErrorCode.USAGE, f"offset {request.offset} is beyond the object's {counted(size, 'byte')}"
            )
        yield pb.DownloadChunk(size_bytes=size)
        async for data in read_ahead(path, request.offset):
            yield pb.DownloadChunk(data=data)
            self._traffic.note_download(len(data))
            failpoint("download-chunk")

    async def GetSoup(self, request: pb.GetSoupRequest, context: Any) -> pb.GetSoupReply:
        """Return the combined soup between two versions; ``BUSY`` while it is being made, which may take minutes."""
        contributor = current_session().contributor
        pair = request.from_version, request.to_version
        future = await asyncio.to_thread(self.combined_soups.request, contributor, *pair)
        try:
            made = asyncio.shield(asyncio.wrap_future(future))  # the soup is created even if this call ends
            sha256, size = await asyncio.wait_for(made, _SOUP_SECONDS)
        except TimeoutError:
            raise being_made() from None
        return pb.GetSoupReply(sha256=sha256, size_bytes=size)

    # ---- replies ----

    async def Submit(self, request: pb.SubmitRequest, context: Any) -> pb.SubmitReply:
        session = current_session()
        if request.ByteSize() > MAX_RECORDS_BYTES:
            raise GymError(
                ErrorCode.TOO_LARGE,
                f"a reply of {counted(request.ByteSize(), 'byte')} is too large; send tensors as objects",
            )
        receipt = await heavily(
            self._submit, session.contributor, session.node_id, request, caller_of(context)
        )
        failpoint("after-submit")
        self._wakeups.notify()
        return pb.SubmitReply(receipt_json=receipt)

    def _submit(self, contributor: str, node_id: int, request: pb.SubmitRequest, caller: str = "") -> str:
        message = self._queue.get(request.message_id)
        if message is None:
            raise GymError(ErrorCode.NOT_FOUND, f"no task {request.message_id}")
        if message.node_id != node_id:
            raise GymError(ErrorCode.PERMISSION_DENIED, f"task {request.message_id} belongs to another node")
        if message.state in ("replied", SET_ASIDE):
            return self._again(message, request)
        self._check_reply(contributor, message, request)
        if "update" not in request.content.configs:
            return self._accept_plain(contributor, message, request)
        submission = self._submission(contributor, message, request)
        if self._live_config.current.privacy is not None:
            manifest = UpdateManifest.parse(submission.manifest_json)
            self._transfers.check_sent(contributor, manifest.delta_sha256)

        def answer(tx: Connection, receipt: Receipt) -> None:
            if is_answered(tx, message.message_id, receipt.update):
                return
            if receipt.verdict == "refused":
                error = pb.ReplyError(code=1, reason=f"{receipt.code}: {receipt.reason}")
                reply = pb.SubmitRequest(message_id=message.message_id, error=error)
            else:
                check_held(tx, message.message_id, node_id)
                reply = request
            record_reply(
                tx, message.message_id, reply.SerializeToString(), receipt.to_json(), self._state.clock.now()
            )

        with round_span("admit", self._state.server, submission.server_round, caller):
            receipt = self._admission.judge(submission, answer)
        self._lease_spans.answered(message.message_id, submission.server_round, receipt.verdict)
        return receipt.to_json()

    def _check_reply(self, contributor: str, message: QueuedMessage, request: pb.SubmitRequest) -> None:
        """Refuse an unreadable reply before it is stored; the node keeps the task and may answer again."""

        def size_of(sha256: str) -> int:
            self._transfers.check_sent(contributor, sha256)
            return self._state.store.size(sha256)

        cap = self._max_update_bytes
        check_reply(pb.Records.FromString(message.content), request, cap, size_of)

    def _submission(
        self, contributor: str, message: QueuedMessage, request: pb.SubmitRequest
    ) -> UpdateSubmission:
        fields = {entry.key: entry.value for entry in request.content.configs["update"].entries}
        try:
            manifest, signature = fields["manifest"].text, fields["signature"].blob
        except KeyError as error:
            raise GymError(ErrorCode.UPDATE_REFUSED, f"the update has no {error}") from error
        key = self._accounts.public_key(contributor)
        group = whole_number(message.group_id) or 0
        return UpdateSubmission(contributor, key, message.message_id, group, manifest, signature)

    def _accept_plain(self, contributor: str, message: QueuedMessage, request: pb.SubmitRequest) -> str:
        receipt = json.dumps({"verdict": "failed" if request.HasField("error") else "received"})
        self._transfers.check_present(contributor, request.content)
        with self._state.database.transaction() as tx:
            check_held(tx, message.message_id, message.node_id)
            require_stored(tx, {ref.sha256 for ref in references(request.content)})
            declined = request.error.code == ErrorCode.TERMS_CHANGED.exit_code
            declined &= self._live_config.current.secure_aggregation is None  # its tasks are sent once
            given_back = declined and self._queue.give_back(tx, message)
            if not given_back:
                record_reply(
                    tx, message.message_id, request.SerializeToString(), receipt, self._state.clock.now()
                )
        if given_back:
            who, why = self._queue.name_of(message.node_id), plain(request.error.reason, MAX_REASON)
            log.info("round %s: %s returned the task: %s", message.group_id, who, why)
        return receipt

    def _again(self, message: QueuedMessage, request: pb.SubmitRequest) -> str:
        """Return the first receipt if the same reply is sent again; refuse any other reply as too late."""
        with self._state.database.reading() as tx:
            row = tx.execute(
                select(messages.c.receipt, messages.c.reply).where(
                    messages.c.message_id == message.message_id
                )
            ).one()
        receipt = str(row.receipt)
        if bytes(row.reply) == request.SerializeToString() or json.loads(receipt).get("update") == _update_id(
            request
        ):
            return receipt
        raise answered_differently(message.message_id)

    # ---- account and ledger ----

    async def Account(self, request: pb.AccountRequest, context: Any) -> pb.AccountReply:
        return await asyncio.to_thread(self._account, current_session().contributor)

    def _account(self, contributor: str) -> pb.AccountReply:
        balance = self._payouts.balance_and_transfers(contributor)
        with self._state.database.reading() as tx:
            account = tx.execute(select(accounts).where(accounts.c.contributor == contributor)).one()
            earned = {
                row.server_round: row.amount
                for row in tx.execute(select(credits).where(credits.c.contributor == contributor))
            }
            rows = tx.execute(
                select(updates)
                .where(updates.c.contributor == contributor)
                .order_by(updates.c.received_at.desc())
                .limit(100)
            ).all()
            worth = rewards_of(tx, contributor, self._live_config.current.rewards)
        if self._live_config.current.privacy is not None:
            worth["privacy"] = privacy.account_of(
                self._live_config.current, self._state.database, contributor
            )
        entries = self._state.ledger.rounds_of(contributor)
        return pb.AccountReply(
            contributor=contributor,
            name=account.name,
            status=account.status,
            balance=balance["balance"],
            rewards_json=json.dumps({**balance, **worth}),
            verdicts_json=[
                json.dumps(
                    {
                        **verdict_line(row, earned),
                        **self._admission.opening(row),
                        "entries": entries.get(row.server_round, []),
                    }
                )
                for row in rows
            ],
        )

    # ---- keys and transfers ----

    async def RotateKey(self, request: pb.RotateKeyRequest, context: Any) -> pb.KeyReply:
        receipt = await asyncio.to_thread(
            self._keys.rotate,
            request.statement_json,
            request.signature,
            request.new_public_key,
            request.new_signature,
        )
        self._wakeups.notify()
        return pb.KeyReply(receipt_json=json.dumps(receipt))

    async def RevokeKey(self, request: pb.RevokeKeyRequest, context: Any) -> pb.KeyReply:
        receipt = await asyncio.to_thread(
            self._keys.revoke,
            request.contributor,
            request.signing_key,
            request.statement_json,
            request.signature,
        )
        self._wakeups.notify()
        return pb.KeyReply(receipt_json=json.dumps(receipt))

    async def Transfer(self, request: pb.TransferRequest, context: Any) -> pb.TransferReply:
        receipt = await asyncio.to_thread(
            self._payouts.request,
            current_session().contributor,
            request.statement_json,
            request.signature,
        )
        return pb.TransferReply(receipt_json=json.dumps(receipt))

    async def Leave(self, request: pb.LeaveRequest, context: Any) -> pb.LeaveReply:
        await asyncio.to_thread(self._accounts.leave, current_session().contributor)
        return pb.LeaveReply()


def _update_id(request: pb.SubmitRequest) -> str | None:
    for entry in request.content.configs["update"].entries if "update" in request.content.configs else ():
        if entry.key == "manifest":
            return UpdateManifest.parse(entry.value.text).digest
    return None
