"""The hub's service, as its description says it: both sides of every call, plain and asyncio's."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import pytest
from gym_server.rpc.hub import Hub

from gym_fed.trust.wire.service import HUB, HubStub, add_hub
from gym_fed.trust.wire.v1 import hub_pb2 as pb
from tests.support.wait import SECONDS


class Some:
    """A call of each shape that proto/ has, and no more."""

    def Status(self, request: pb.StatusRequest, context: Any) -> pb.StatusReply:
        return pb.StatusReply(software_version="one of one")

    def Upload(self, requests: Iterable[pb.UploadChunk], context: Any) -> pb.UploadState:
        return pb.UploadState(offset=sum(len(chunk.data) for chunk in requests))

    def Download(self, request: pb.DownloadRequest, context: Any) -> Iterator[pb.DownloadChunk]:
        yield from (pb.DownloadChunk(data=bytes([number])) for number in range(3))


@pytest.fixture
def address() -> Iterator[str]:
    server = grpc.server(ThreadPoolExecutor(2))
    add_hub(Some(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield f"127.0.0.1:{port}"
    server.stop(None).wait()


def test_a_call_of_each_shape_goes_through(address: str) -> None:
    with grpc.insecure_channel(address) as channel:
        hub = HubStub(channel)
        assert hub.Status(pb.StatusRequest(), timeout=SECONDS).software_version == "one of one"
        chunks = (pb.UploadChunk(data=b"xy") for _ in range(3))
        assert hub.Upload(chunks, timeout=SECONDS).offset == 6
        assert [chunk.data for chunk in hub.Download(pb.DownloadRequest(), timeout=SECONDS)] == [
            b"\0",
            b"\1",
            b"\2",
        ]


async def test_an_asyncio_channel_has_the_same_calls(address: str) -> None:
    async with grpc.aio.insecure_channel(address) as channel:
        reply = await HubStub(channel).Status(pb.StatusRequest(), timeout=SECONDS)
        assert reply.software_version == "one of one"


def test_a_call_without_a_method_is_refused_by_name(address: str) -> None:
    with grpc.insecure_channel(address) as channel:
        hub = HubStub(channel)
        with pytest.raises(grpc.RpcError) as refused:
            hub.Enrol(pb.EnrolRequest(), timeout=SECONDS)
        assert refused.value.code() is grpc.StatusCode.UNIMPLEMENTED
        with pytest.raises(AttributeError, match="Hub has no call 'Stats'"):
            hub.Stats  # noqa: B018


def test_the_hub_answers_every_call_of_the_service() -> None:
    assert [method.name for method in HUB.methods if not callable(getattr(Hub, method.name, None))] == []
