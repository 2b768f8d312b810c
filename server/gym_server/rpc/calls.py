"""The calls of `hub.proto` that do not belong to rounds: status, enrolment, login, the ledger and variants."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import gym_fed
from gym_fed.config.hub.seeding import SeedingTerms
from gym_fed.config.schema.plugins import as_json
from gym_fed.trust.identity.keys import SigningKey
from gym_fed.trust.ledger.entries import Entry
from gym_fed.trust.mirrors.listing import SignedMirrors
from gym_fed.trust.wire.limits import PROTOCOL
from gym_fed.trust.wire.protocol import require_contributor
from gym_fed.trust.wire.v1 import hub_pb2 as pb
from gym_server.accounts.accounts import Accounts
from gym_server.base.served import ServedBase
from gym_server.clock_watch import ContributorClocks
from gym_server.privacy import budget as privacy
from gym_server.rounds.downloads import Downloads
from gym_server.rounds.queue import MessageQueue
from gym_server.rounds.recipes import LiveConfig
from gym_server.rounds.round_store import PAID_VERDICTS
from gym_server.rounds.steering import Steering
from gym_server.rpc.auth_interceptor import current_address, current_session
from gym_server.rpc.limits import EnrolmentLimits, host_of
from gym_server.rpc.threads import heavily
from gym_server.seeding.tracker import SeedTracker
from gym_server.state import HubState
from gym_server.strategy.tasks import plugins_of_round
from gym_server.variants.checks import EVERYONE
from gym_server.variants.variants import HeldVariant, HubVariants

_LAST = 2**63 - 1


class CallsBesideRounds:
    """Mixin of the hub's service with the calls that do not belong to a round."""

    _state: HubState
    _live_config: LiveConfig
    _queue: MessageQueue
    _accounts: Accounts
    _steering: Steering
    _variants: HubVariants
    _contributor_clocks: ContributorClocks
    _max_update_bytes: int
    _ledger_key: SigningKey
    _downloads: Downloads
    base: ServedBase
    _enrolments: EnrolmentLimits
    _seeds: SeedTracker
    finished: asyncio.Event

    async def Status(self, request: pb.StatusRequest, context: Any) -> pb.StatusReply:
        return await asyncio.to_thread(self._status)

    def _status(self) -> pb.StatusReply:
        current, head = self._state.round_store.current(), self._state.round_store.head()
        ledger_head = self._state.ledger.newest_head()
        connected = len(self._queue.node_ids())
        join_bytes, round_bytes = self._downloads.announced(head.height, connected)
        made = self._state.round_store.num_committed()
        recipe = {
            "recipe": self._live_config.current.recipe_at(made).model_dump(mode="json"),
            "codec": self._live_config.current.codec.model_dump(mode="json"),
            "pay": self._live_config.current.rewards.terms().model_dump(mode="json"),
            "num_parameters": self._state.base.num_parameters,
            "soup": self._downloads.form.to_dict(),
        }
        rounds, region = self._live_config.current.rounds, self._live_config.current.region
        if region is None:
            recipe["rounds_left"] = max(0, rounds.num_rounds - made)
        else:
            recipe["region"] = region.model_dump(mode="json")
        if rounds.audit is not None:
            recipe["audit"] = rounds.audit.terms().model_dump(mode="json")
        if rounds.mode == "continuous":
            recipe["continuous"] = {key: getattr(rounds, key) for key in ("merge_every", "max_staleness")}
        if (seeding := self._live_config.current.seeding) is not None:
            recipe["seeding"] = SeedingTerms.of(seeding).model_dump(mode="json")
        if mirrors := self._live_config.current.mirrors:
            recipe["mirrors"] = SignedMirrors.sign(self._ledger_key, mirrors).model_dump(mode="json")
        plugins = plugins_of_round(
            self._live_config.current, self._state.ledger, self._live_config.current.recipe
        )
        if plugins:
            recipe["plugins"] = as_json(plugins)
        ahead, num_clocks = self._contributor_clocks.median()
        return pb.StatusReply(
            name=self._live_config.current.name,
            software_version=gym_fed.__version__,
            ledger_public_key=self._ledger_key.public_key,
            enrolment=self._live_config.current.enrolment.policy,
            base_model=self._live_config.current.public_base_name,
            base_digest=self._state.base.digest,
            version_height=head.height,
            version_digest=head.digest,
            server_round=current.server_round if current else 0,
            round_state=current.state if current else "",
            num_rounds=rounds.num_rounds if region is None else 0,  # unknown in a region
            num_connected=connected,
            finished=self.finished.is_set(),
            recipe_json=json.dumps(recipe),
            max_update_bytes=self._max_update_bytes,
            join_download_bytes=join_bytes,
            round_download_bytes=round_bytes,
            privacy_json=privacy.status_json(self._live_config.current, self._state.database),
            ledger_head_json=ledger_head.to_json() if ledger_head else "",
            restored_json=self._state.ledger.statements(),
            protocol=PROTOCOL,
            enrolment_work_bits=self._accounts.work_bits,
            base_json=self.base.offer_json(),
            paused=str(pause) if (pause := self._steering.paused()) else "",
            hub_seconds=self._state.clock.now(),
            clock_seconds=self._state.clock.wall(),
            contributors_ahead_seconds=ahead,
            num_clocks=num_clocks,
        )

    async def Base(self, request: pb.BaseRequest, context: Any) -> AsyncIterator[pb.BasePart]:
        for part in await asyncio.to_thread(self.base.parts):
            yield part

    async def Enrol(self, request: pb.EnrolRequest, context: Any) -> pb.EnrolReply:
        require_contributor(request.protocol)
        contributor = await asyncio.to_thread(self._enrol, request, current_address())
        return pb.EnrolReply(contributor=contributor)

    def _enrol(self, request: pb.EnrolRequest, address: str) -> str:
        accounts = self._accounts
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
            self._accounts.authenticate,
            request.contributor,
            request.instance,
            request.issued_at_seconds,
            request.nonce,
            request.signature,
            request.left,
        )
        self._contributor_clocks.note(request.contributor, request.clock_seconds, self._state.clock.now())
        return pb.AuthenticateReply(session=token, expires_at_seconds=int(expires), node_id=node_id)

    # ---- seeding ----

    async def Seed(self, request: pb.SeedRequest, context: Any) -> pb.SeedReply:
        return await self._seeds.announce(current_session(), host_of(context.peer()), request)

    async def FindSeeder(self, request: pb.FindSeederRequest, context: Any) -> pb.FindSeederReply:
        return await self._seeds.find(current_session(), host_of(context.peer()), request)

    # ---- the ledger ----

    async def Ledger(self, request: pb.LedgerRequest, context: Any) -> AsyncIterator[pb.LedgerEntry]:
        entries = self._state.ledger.entries(_position(max(1, request.from_sequence)))
        while (entry := await asyncio.to_thread(next, entries, None)) is not None:
            yield entry_message(entry)

    async def LedgerHeads(self, request: pb.LedgerHeadsRequest, context: Any) -> AsyncIterator[pb.LedgerHead]:
        heads = self._state.ledger.heads(_position(max(1, request.from_size)))
        while (head := await asyncio.to_thread(next, heads, None)) is not None:
            yield pb.LedgerHead(head_json=head.to_json())

    async def LedgerProof(self, request: pb.LedgerProofRequest, context: Any) -> pb.LedgerProofReply:
        proof = await asyncio.to_thread(
            self._state.ledger.proof, _position(request.sequence), _position(request.size)
        )
        entry, head = entry_message(proof.entry), proof.head.to_json()
        return pb.LedgerProofReply(entry=entry, head_json=head, path=proof.path)

    # ---- variants ----

    async def PutVariant(self, request: pb.PutVariantRequest, context: Any) -> pb.PutVariantReply:
        names = list(request.readers.contributors) if request.HasField("readers") else None
        caller = current_session().contributor
        receipt = await heavily(self._variants.put, caller, request.variant_json, names)
        if receipt is None:
            return pb.PutVariantReply(needs_object=True)
        return pb.PutVariantReply(receipt_json=json.dumps(receipt))

    async def GetVariant(self, request: pb.GetVariantRequest, context: Any) -> pb.VariantInfo:
        caller = current_session().contributor
        found = await asyncio.to_thread(self._variants.get, caller, request.owner, request.name)
        return variant_message(found, caller, with_names=True)

    async def ListVariants(self, request: pb.ListVariantsRequest, context: Any) -> pb.ListVariantsReply:
        caller = current_session().contributor
        found, following = await asyncio.to_thread(
            self._variants.page, caller, request.page, request.page_size
        )
        messages = [variant_message(variant, caller, with_names=False) for variant in found]
        return pb.ListVariantsReply(variants=messages, next_page=following)

    async def DeleteVariant(self, request: pb.DeleteVariantRequest, context: Any) -> pb.DeleteVariantReply:
        caller = current_session().contributor
        receipt = await asyncio.to_thread(self._variants.remove, caller, request.name)
        return pb.DeleteVariantReply(receipt_json=json.dumps(receipt))


def variant_message(found: HeldVariant, caller: str, with_names: bool) -> pb.VariantInfo:
    """Convert a variant to a message; only its owner sees who else may read it."""
    is_owner = found.signed.manifest.owner == caller
    named = [name for name in found.readers if name != EVERYONE]
    return pb.VariantInfo(
        variant_json=found.document,
        base=found.base,
        key_status=found.key_status,
        ledger_sequence=found.ledger_sequence,
        put_at_seconds=found.put_at,
        is_public=EVERYONE in found.readers,
        num_readers=len(named) if is_owner else 0,
        readers=found.readers if is_owner and with_names else (),
    )


def _position(number: int) -> int:
    """Clamp a received number to the integer range of databases, which exceeds any ledger's length."""
    return min(number, _LAST)


def entry_message(entry: Entry) -> pb.LedgerEntry:
    """Convert a ledger entry to a message, with the body text that was hashed."""
    return pb.LedgerEntry(
        sequence=entry.sequence,
        kind=entry.kind,
        body_json=entry.body_json,
        previous_hash=entry.previous_hash,
        hash=entry.hash,
    )


def verdict_line(row: Any, earned: dict[int, int]) -> dict[str, Any]:
    """Return a row of ``updates`` as shown to its contributor, with the credits earned in the round."""
    return {
        "update": row.update_id,
        "server_round": row.server_round,
        "verdict": row.verdict,
        "reason": row.reason,
        "bytes": row.delta_bytes,
        "credit": earned.get(row.server_round, 0) if row.verdict in PAID_VERDICTS else 0,
    }
