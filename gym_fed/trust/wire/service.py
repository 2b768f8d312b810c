"""Client stub and server handlers of the gRPC service ``gym.fed.v1.Hub``."""

from __future__ import annotations

from typing import Any

import grpc
from google.protobuf.descriptor import MethodDescriptor
from google.protobuf.message_factory import GetMessageClass

from gym_fed.trust.wire.v1 import hub_pb2

HUB = hub_pb2.DESCRIPTOR.services_by_name["Hub"]


class HubStub:
    """Stub of the service over a sync or asyncio channel: ``stub.Status(request, timeout=...)``."""

    def __init__(self, channel: Any) -> None:
        for method in HUB.methods:
            call = getattr(channel, _shape(method))(
                f"/{HUB.full_name}/{method.name}",
                request_serializer=GetMessageClass(method.input_type).SerializeToString,
                response_deserializer=GetMessageClass(method.output_type).FromString,
            )
            setattr(self, method.name, call)

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"{HUB.full_name} has no call {name!r}")


def add_hub(hub: Any, server: Any) -> None:
    """Register the methods of ``hub`` by name on a sync or asyncio ``server``.

    gRPC answers calls to missing methods with UNIMPLEMENTED.
    """
    handlers = {
        method.name: getattr(grpc, f"{_shape(method)}_rpc_method_handler")(
            getattr(hub, method.name),
            request_deserializer=GetMessageClass(method.input_type).FromString,
            response_serializer=GetMessageClass(method.output_type).SerializeToString,
        )
        for method in HUB.methods
        if hasattr(hub, method.name)
    }
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(HUB.full_name, handlers),))


def _shape(method: MethodDescriptor) -> str:
    """Return the gRPC name of a method's type, such as ``unary_stream``."""
    kinds = ("stream" if many else "unary" for many in (method.client_streaming, method.server_streaming))
    return "_".join(kinds)
