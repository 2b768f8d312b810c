"""A short name for the generated messages of ``gym.fed.v1``."""

from gym_fed.trust.wire._generated.gym.fed.v1 import hub_pb2

__all__ = ["hub_pb2"]
