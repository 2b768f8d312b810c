"""A failed call as an error that a person reads."""

from __future__ import annotations

import grpc
import pytest

from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.trust.wire.errors import from_rpc_error
from gym_fed.trust.wire.service import HubStub
from gym_fed.trust.wire.v1 import hub_pb2 as pb
from tests.support.wait import SECONDS


def test_a_server_that_is_not_there_is_named_once_with_the_reason_alone() -> None:
    with grpc.insecure_channel("127.0.0.1:1") as channel, pytest.raises(grpc.RpcError) as caught:
        HubStub(channel).Status(pb.StatusRequest(), timeout=SECONDS)
    found: GymError = from_rpc_error(caught.value, "127.0.0.1:1")
    assert found.code is ErrorCode.UNAVAILABLE
    assert found.message.startswith("cannot reach 127.0.0.1:1: Connection refused")
    assert found.message.count("127.0.0.1:1") == 1
