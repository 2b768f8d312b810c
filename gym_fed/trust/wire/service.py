"""Client stubs and server handlers of the gRPC services ``gym.fed.v1.Hub`` and ``Seeder``."""

from __future__ import annotations

from typing import Any

import grpc
from google.protobuf.descriptor import MethodDescriptor, ServiceDescriptor
from google.protobuf.message_factory import GetMessageClass

from gym_fed.trust.wire.v1 import hub_pb2

HUB = hub_pb2.DESCRIPTOR.services_by_name["Hub"]
SEEDER = hub_pb2.DESCRIPTOR.services_by_name["Seeder"]


class _Stub:
    """Stub of a service over a sync or asyncio channel: ``stub.Status(request, timeout=...)``."""

    _service: ServiceDescriptor

    def __init__(self, channel: Any) -> None:
        for method in self._service.methods:
            call = getattr(channel, _shape(method))(
                f"/{self._service.full_name}/{method.name}",
                request_serializer=GetMessageClass(method.input_type).SerializeToString,
                response_deserializer=GetMessageClass(method.output_type).FromString,
            )
            setattr(self, method.name, call)

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"{self._service.full_name} has no call {name!r}")


class HubStub(_Stub):
    """Stub of the service of a hub."""

    _service = HUB


class SeederStub(_Stub):
    """Stub of the service of a contributor who seeds."""

    _service = SEEDER


def add_hub(hub: Any, server: Any) -> None:
    """Register the methods of ``hub`` by name on a sync or asyncio ``server``.

    gRPC answers calls to missing methods with UNIMPLEMENTED.
    """
    _add(HUB, hub, server)


def add_seeder(seeder: Any, server: Any) -> None:
    """Register the methods of ``seeder`` by name on a ``server``; see ``add_hub``."""
    _add(SEEDER, seeder, server)


def _add(service: ServiceDescriptor, servicer: Any, server: Any) -> None:
    handlers = {
        method.name: getattr(grpc, f"{_shape(method)}_rpc_method_handler")(
            getattr(servicer, method.name),
            request_deserializer=GetMessageClass(method.input_type).FromString,
            response_serializer=GetMessageClass(method.output_type).SerializeToString,
        )
        for method in service.methods
        if hasattr(servicer, method.name)
    }
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service.full_name, handlers),))


def _shape(method: MethodDescriptor) -> str:
    """Return the gRPC name of a method's type, such as ``unary_stream``."""
    kinds = ("stream" if many else "unary" for many in (method.client_streaming, method.server_streaming))
    return "_".join(kinds)
