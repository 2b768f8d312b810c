"""The generated messages and stubs of ``gym.fed.v1`` under one short name."""

from gym_fed.wire._generated.gym.fed.v1 import hub_pb2, hub_pb2_grpc

__all__ = ["hub_pb2", "hub_pb2_grpc"]
