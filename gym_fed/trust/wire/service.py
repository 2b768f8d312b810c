"""Client stubs and server handlers of the gRPC services ``gym.fed.v1.Hub``, ``Seeder`` and gRPC's health protocol."""

from __future__ import annotations

from typing import Any

import grpc
from google.protobuf.descriptor import MethodDescriptor, ServiceDescriptor
from google.protobuf.message_factory import GetMessageClass
from grpc_health.v1 import health_pb2

from gym_fed.trust.wire.v1 import hub_pb2

HUB = hub_pb2.DESCRIPTOR.services_by_name["Hub"]
SEEDER = hub_pb2.DESCRIPTOR.services_by_name["Seeder"]
HEALTH = health_pb2.DESCRIPTOR.services_by_name["Health"]


class _Stub:
    """A stub of a service on a sync or asyncio channel: ``stub.Status(request, timeout=...)``."""

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
    """The stub of a hub's service."""

    _service = HUB


class SeederStub(_Stub):
    """The stub of the service of a contributor who seeds."""

    _service = SEEDER


class HealthStub(_Stub):
    """The stub of ``grpc.health.v1.Health``, which monitoring and load balancers use."""

    _service = HEALTH


def add_hub(hub: Any, server: Any) -> None:
    """Register the methods of ``hub`` by name on a sync or asyncio ``server``.

    gRPC answers calls to methods that ``hub`` lacks with UNIMPLEMENTED.
    """
    _add(HUB, hub, server)


def add_seeder(seeder: Any, server: Any) -> None:
    """Register the methods of ``seeder`` by name on a ``server``; see ``add_hub``."""
    _add(SEEDER, seeder, server)


def add_health(health: Any, server: Any) -> None:
    """Register the methods of ``health`` by name on a ``server``; see ``add_hub``."""
    _add(HEALTH, health, server)


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
    """Return gRPC's name for the type of a method, such as ``unary_stream``."""
    kinds = ("stream" if many else "unary" for many in (method.client_streaming, method.server_streaming))
    return "_".join(kinds)
