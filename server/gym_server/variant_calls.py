"""The variants' calls of `hub.proto`."""

from __future__ import annotations

import asyncio
import json
from typing import Any

from gym_fed.wire.v1 import hub_pb2 as pb
from gym_server.guard import current_session
from gym_server.threads import heavily
from gym_server.variant_checks import EVERYONE
from gym_server.variants import HeldVariant, Variants


class VariantCalls:
    """A part of the hub's service."""

    _variants: Variants

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
        told = [variant_message(variant, caller, with_names=False) for variant in found]
        return pb.ListVariantsReply(variants=told, next_page=following)

    async def DeleteVariant(self, request: pb.DeleteVariantRequest, context: Any) -> pb.DeleteVariantReply:
        caller = current_session().contributor
        receipt = await asyncio.to_thread(self._variants.remove, caller, request.name)
        return pb.DeleteVariantReply(receipt_json=json.dumps(receipt))


def variant_message(found: HeldVariant, caller: str, with_names: bool) -> pb.VariantInfo:
    """A variant as the caller is told of it: who else may read it is the owner's to know."""
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
