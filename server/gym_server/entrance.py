"""The calls of `hub.proto` that need no session: who the hub is, enrolment, login."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import gym_fed
from gym_fed.config.plugins import as_json, plugins_of
from gym_fed.wire.limits import PROTOCOL
from gym_fed.wire.protocol import require_contributor
from gym_fed.wire.v1 import hub_pb2 as pb
from gym_server import privacy
from gym_server.downloads import Downloads
from gym_server.enrolment_limits import EnrolmentLimits
from gym_server.federation import Federation
from gym_server.guard import current_address


class EntranceCalls:
    """A part of the hub's service."""

    _fed: Federation
    _downloads: Downloads
    _enrolments: EnrolmentLimits
    finished: asyncio.Event

    async def Status(self, request: pb.StatusRequest, context: Any) -> pb.StatusReply:
        return await asyncio.to_thread(self._status)

    def _status(self) -> pb.StatusReply:
        fed, current, head = self._fed, self._fed.journal.current(), self._fed.journal.head()
        ledger_head = fed.ledger.newest_head()
        connected = len(fed.queue.node_ids())
        join_bytes, round_bytes = self._downloads.announced(head.height, connected)
        recipe = {
            "recipe": fed.config.recipe_at(head.height).model_dump(mode="json"),
            "codec": fed.config.codec.model_dump(mode="json"),
            "num_parameters": fed.base.num_parameters,
            "soup": self._downloads.form.to_dict(),
        }
        plugins = plugins_of(fed.config.recipe, fed.config.codec)
        if plugins:
            recipe["plugins"] = as_json(plugins)
        return pb.StatusReply(
            name=fed.config.name,
            software_version=gym_fed.__version__,
            ledger_public_key=fed.key.public_key,
            enrolment=fed.config.enrolment.policy,
            base_model=fed.public_base_name,
            base_digest=fed.base.digest,
            version_height=head.height,
            version_digest=head.digest,
            server_round=current.server_round if current else 0,
            round_state=current.state if current else "",
            num_rounds=fed.config.rounds.num_rounds,
            num_connected=connected,
            finished=self.finished.is_set(),
            recipe_json=json.dumps(recipe),
            max_update_bytes=fed.config.admission.max_update_bytes,
            join_download_bytes=join_bytes,
            round_download_bytes=round_bytes,
            privacy_json=privacy.status_json(fed),
            ledger_head_json=ledger_head.to_json() if ledger_head else "",
            restored_json=fed.ledger.statements(),
            protocol=PROTOCOL,
            enrolment_work_bits=fed.accounts.work_bits,
        )

    async def Enrol(self, request: pb.EnrolRequest, context: Any) -> pb.EnrolReply:
        require_contributor(request.protocol)
        contributor = await asyncio.to_thread(self._enrol, request, current_address())
        return pb.EnrolReply(contributor=contributor)

    def _enrol(self, request: pb.EnrolRequest, address: str) -> str:
        accounts = self._fed.accounts
        newcomer: AbstractContextManager[Callable[[], None]] = nullcontext(lambda: None)
        if accounts.is_new(request.public_key):
            newcomer = self._enrolments.attempt(address)
        with newcomer as admit:
            return accounts.enrol(
                request.public_key, request.name, request.invite, request.signature, request.work, admit
            )

    async def Authenticate(self, request: pb.AuthenticateRequest, context: Any) -> pb.AuthenticateReply:
        require_contributor(request.protocol)
        token, expires, node_id = await asyncio.to_thread(
            self._fed.accounts.authenticate,
            request.contributor,
            request.instance,
            request.issued_at_seconds,
            request.nonce,
            request.signature,
            request.left,
        )
        return pb.AuthenticateReply(session=token, expires_at_seconds=int(expires), node_id=node_id)
