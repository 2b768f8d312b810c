"""Shares of accounts and addresses at a hub over real gRPC: a caller beyond its share slows down nobody else."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import grpc
import pytest
from gym_client.hub.transport import HubClient
from gym_server.store.tables import messages, nodes
from sqlalchemy import select

from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.trust.wire.v1 import hub_pb2 as pb
from tests.support.loopback_hub import LoopbackHub
from tests.support.wait import SECONDS, until

LIMITS = {
    "nodes_per_account": 3,
    "streams_per_account": 2,
    "calls_per_account": 4,
    "calls_per_second": 20,
    "calls_per_second_of_account": 10,
    "calls_per_address": 50,
    "idle_upload_seconds": 0.5,
}


@pytest.fixture(autouse=True)
def _no_long_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    """A hub holds a refusal for five seconds, and looks at its work streams as often."""
    monkeypatch.setattr("gym_server.rpc.auth_interceptor._REFUSAL_SECONDS", 0.1)
    monkeypatch.setattr("gym_server.rpc.streams._TOUCH_SECONDS", 0.1)


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[LoopbackHub]:
    found = LoopbackHub(tmp_path / "hub", limits=LIMITS)
    yield found
    found.close()


def code_of(call: Callable[[], Any]) -> ErrorCode | None:
    try:
        call()
    except GymError as error:
        return error.code
    return None


def as_instance(client: HubClient, name: str) -> int:
    """Log in as another installation of the same account; its node id."""
    client._instance = name
    client.authenticate()
    return client.node_id


def test_calls_beyond_an_account_s_rate_are_busy_and_another_account_goes_on(
    ann: HubClient, bob: HubClient
) -> None:
    with ThreadPoolExecutor(4) as threads:
        codes = list(
            threads.map(lambda _: code_of(lambda: ann.call("Account", pb.AccountRequest())), range(120))
        )
    assert set(codes) == {None, ErrorCode.BUSY}
    assert code_of(lambda: bob.call("Account", pb.AccountRequest())) is None
    until(lambda: code_of(lambda: ann.call("Account", pb.AccountRequest())) is None)


def test_a_stranger_s_flood_of_status_calls_leaves_those_who_are_logged_in_alone(
    hub: LoopbackHub, ann: HubClient
) -> None:
    stranger = HubClient(ann.home, ann.address, ann.pin)
    until(
        lambda: code_of(lambda: ann.call("Account", pb.AccountRequest())) is None
    )  # now the hub knows the session
    with stranger, ThreadPoolExecutor(8) as threads:
        codes = list(
            threads.map(lambda _: code_of(lambda: stranger.call("Status", pb.StatusRequest())), range(150))
        )
        assert ErrorCode.BUSY in codes
        assert ann.status().name, "a session has the call counted as its account's"


def test_an_address_without_a_login_gets_its_burst_and_then_its_rate_whatever_the_machine_does(
    tmp_path: Path,
) -> None:
    """The clock of the buckets stands still, so a slow machine refills nothing."""
    now = 100.0
    limits = {"calls_per_second": 2, "calls_per_second_of_account": 2, "enrolment_work_bits": 0}
    found = LoopbackHub(tmp_path / "hub", lambda: now, limits=limits)
    ann = found.client(tmp_path / "ann")
    stranger = HubClient(ann.home, ann.address, ann.pin)

    def codes(client: HubClient, method: str, request: Any, count: int) -> list[ErrorCode | None]:
        return [code_of(lambda: client.call(method, request)) for _ in range(count)]

    def accepted(count: int) -> list[ErrorCode | None]:
        return [None] * count

    with ann, stranger:
        assert codes(ann, "Account", pb.AccountRequest(), 1) == [
            None
        ]  # from here on the hub knows the session
        now += 1_000.0
        assert codes(stranger, "Status", pb.StatusRequest(), 8) == accepted(8), "four seconds' worth"
        assert codes(stranger, "Status", pb.StatusRequest(), 2) == [ErrorCode.BUSY] * 2
        with pytest.raises(GymError, match="calls too often") as refused:
            stranger.call("Status", pb.StatusRequest())
        assert refused.value.hint == "wait 0.5 s"
        now += 1.0
        assert codes(stranger, "Status", pb.StatusRequest(), 3) == [*accepted(2), ErrorCode.BUSY]
        assert codes(ann, "Account", pb.AccountRequest(), 16) == accepted(16), (
            "eight seconds' worth of its own"
        )
        assert codes(ann, "Account", pb.AccountRequest(), 1) == [ErrorCode.BUSY]
    found.close()


def test_forged_tokens_of_an_account_use_up_the_forger_s_share_and_not_the_account_s(
    ann: HubClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gym_server.rpc.auth_interceptor._REFUSAL_SECONDS", 5.0)
    session = ann._session

    def forged(number: int) -> ErrorCode | None:
        stub, metadata = ann._stub, (("gym-session", f"{session[:-8]}{number:08d}"),)
        with ann.errors():
            stub.Account(pb.AccountRequest(), timeout=SECONDS, metadata=metadata)
        return None

    with ThreadPoolExecutor(4) as threads:
        codes = list(threads.map(lambda n: code_of(lambda: forged(n)), range(120)))
    assert set(codes) == {ErrorCode.UNAUTHENTICATED, ErrorCode.BUSY}
    assert code_of(lambda: ann.call("Account", pb.AccountRequest())) is None


def test_an_account_s_hundred_mute_uploads_hold_its_slots_for_a_moment_and_nobody_else_s(
    hub: LoopbackHub, ann: HubClient, bob: HubClient
) -> None:
    def never() -> Iterator[pb.UploadChunk]:
        time.sleep(20)
        yield pb.UploadChunk()

    metadata = (("gym-session", ann._session),)
    calls = [ann._stub.Upload.future(never(), timeout=60, metadata=metadata) for _ in range(100)]
    codes = [call.code() for call in calls[:10]]
    assert set(codes) <= {grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.RESOURCE_EXHAUSTED}
    assert grpc.StatusCode.DEADLINE_EXCEEDED in codes, "those that were let in end when nothing comes"
    assert code_of(lambda: bob.call("Account", pb.AccountRequest())) is None
    for call in calls:
        call.cancel()


@pytest.mark.parametrize("who", ["account", "address"])
def test_calls_under_way_hold_the_slots_of_their_caller_until_they_end(tmp_path: Path, who: str) -> None:
    """The slots alone: rates are high, and nothing that is held ends by itself."""
    roomy = {
        "calls_per_second": 1_000,
        "calls_per_second_of_account": 1_000,
        "idle_upload_seconds": 60,
        "enrolment_work_bits": 0,
    }
    limits = {**roomy, f"calls_per_{who}": 2}
    found = LoopbackHub(tmp_path / "hub", limits=limits)
    ann, bob = found.client(tmp_path / "ann"), found.client(tmp_path / "bob")
    stranger = HubClient(ann.home, ann.address, ann.pin)
    with ann, bob, stranger:
        full, other = (ann, bob) if who == "account" else (stranger, ann)
        for one in (ann, bob):  # from here on the hub knows their sessions
            one.call("Account", pb.AccountRequest())
        metadata = (("gym-session", full._session),) if who == "account" else ()
        status = full._channel.stream_unary(
            "/gym.fed.v1.Hub/Status",
            request_serializer=pb.StatusRequest.SerializeToString,
            response_deserializer=pb.StatusReply.FromString,
        )
        ended = threading.Event()

        def never() -> Iterator[pb.StatusRequest]:
            ended.wait(SECONDS)
            yield from ()

        def code(client: HubClient) -> ErrorCode | None:
            return code_of(lambda: client.call("Status", pb.StatusRequest()))

        assert code(full) is None
        calls = [status.future(never(), timeout=60, metadata=metadata) for _ in range(2)]
        until(lambda: code(full) is ErrorCode.BUSY)
        assert code(other) is None, "nobody else's slots are held"
        for call in calls:
            call.cancel()
        until(lambda: code(full) is None)
        ended.set()
    found.close()


def test_a_call_whose_request_never_comes_is_ended(
    hub: LoopbackHub, ann: HubClient, monkeypatch: Any
) -> None:
    monkeypatch.setattr("gym_server.rpc.auth_interceptor.REQUEST_SECONDS", 0.3)
    account = ann._channel.stream_unary(
        "/gym.fed.v1.Hub/Account",
        request_serializer=pb.AccountRequest.SerializeToString,
        response_deserializer=pb.AccountReply.FromString,
    )

    def never() -> Iterator[pb.AccountRequest]:
        time.sleep(5)
        yield pb.AccountRequest()

    call = account.future(never(), timeout=30, metadata=(("gym-session", ann._session),))
    assert call.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    assert "sent no request" in call.details()


def test_three_hundred_installations_of_an_account_leave_as_many_nodes_as_it_may_have(
    hub: LoopbackHub, ann: HubClient
) -> None:
    ids = []
    for number in range(30):
        until(
            lambda number=number: code_of(lambda: ids.append(as_instance(ann, f"instance{number}"))) is None
        )
    with hub.fed.database.reading() as tx:
        left = tx.scalars(select(nodes.c.node_id).order_by(nodes.c.node_id)).all()
    assert left == ids[-3:], "those idle for longest were forgotten"
    assert len(set(ids)) == 30, "and no number was given twice"


def test_an_installation_at_work_is_never_forgotten(hub: LoopbackHub, ann: HubClient) -> None:
    busy = [as_instance(ann, f"instance{number}") for number in range(3)]
    for node_id in busy:
        hub.fed.queue.push(node_id, "1", "train", time.time(), 600.0, b"")
    assert code_of(lambda: as_instance(ann, "instance9")) is ErrorCode.QUOTA_EXCEEDED
    with hub.fed.database.transaction() as tx:
        tx.execute(messages.update().where(messages.c.node_id == busy[1]).values(state="lost"))
    as_instance(ann, "instance9")
    with hub.fed.database.reading() as tx:
        left = set(tx.scalars(select(nodes.c.node_id)))
    assert left == {busy[0], busy[2], ann.node_id}


def why_ended(client: HubClient, stream: Any) -> GymError:
    with pytest.raises(GymError) as ended, client.errors():
        for _ in stream:
            pass
    return ended.value


def test_a_newer_work_stream_of_an_installation_ends_the_older_and_gets_the_tasks(
    hub: LoopbackHub, ann: HubClient
) -> None:
    """Who reconnects is never locked out by what is left of its last connection."""
    with ExitStack() as stack:
        first = ann.stream("Work", pb.WorkRequest(), 60)
        stack.callback(first.cancel)
        until(lambda: hub.fed.queue.node_ids() == [ann.node_id])
        second = ann.stream("Work", pb.WorkRequest(), 60)
        stack.callback(second.cancel)
        assert why_ended(ann, first).code is ErrorCode.QUOTA_EXCEEDED
        assert hub.fed.queue.node_ids() == [ann.node_id], "it counts as connected all the while"
        hub.fed.queue.push(ann.node_id, "1", "train", time.time(), 600.0, b"")
        with ann.errors():
            assert next(iter(second)).HasField("task")


def test_work_streams_beyond_an_account_s_share_end_the_oldest(hub: LoopbackHub, ann: HubClient) -> None:
    with ExitStack() as stack:
        streams, ids = [], []
        for number in range(3):
            ids.append(as_instance(ann, f"instance{number}"))
            streams.append(ann.stream("Work", pb.WorkRequest(), 60))
            stack.callback(streams[-1].cancel)
            until(lambda: ids[-1] in connected(hub))
        assert "limits.streams_per_account" in why_ended(ann, streams[0]).hint
        until(lambda: connected(hub) == set(ids[1:]))
        assert hub.fed.queue.node_ids() == [ids[1]], "of an account's nodes one is given tasks"


def connected(hub: LoopbackHub) -> set[int]:
    """Every node that is connected, several of one account too."""
    with hub.fed.database.reading() as tx:
        return set(tx.scalars(select(nodes.c.node_id).where(nodes.c.connected_until > time.time())))


def test_a_key_that_is_revoked_ends_the_stream_of_who_waits(hub: LoopbackHub, ann: HubClient) -> None:
    with ExitStack() as stack:
        stream = ann.stream("Work", pb.WorkRequest(), 60)
        stack.callback(stream.cancel)
        until(lambda: hub.fed.queue.node_ids() == [ann.node_id])
        ann.call("Leave", pb.LeaveRequest())
        assert why_ended(ann, stream).code is ErrorCode.UNAUTHENTICATED


@pytest.mark.slow  # a thousand calls
def test_a_thousand_refusals_are_a_handful_of_lines_in_the_log(
    ann: HubClient, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "gym_server")
    with ThreadPoolExecutor(16) as threads:
        list(threads.map(lambda _: code_of(lambda: ann.call("Account", pb.AccountRequest())), range(300)))
    summaries = [record for record in caplog.records if "refused" in record.getMessage()]
    assert 1 <= len(summaries) <= 4


def test_a_reader_that_takes_nothing_is_given_up(
    hub: LoopbackHub, ann: HubClient, tmp_path: Path, monkeypatch: Any
) -> None:
    monkeypatch.setattr("gym_server.rpc.auth_interceptor.WRITE_SECONDS", 0.5)
    sha256 = hub.fed.store.put_bytes(bytes(48 << 20))
    with hub.fed.database.transaction() as tx:
        from gym_server.store.tables import readers

        tx.execute(readers.insert().values(sha256=sha256, contributor="*"))
    stream = ann.stream("Download", pb.DownloadRequest(sha256=sha256), 60)
    next(iter(stream))
    time.sleep(3)
    with pytest.raises(GymError) as ended, ann.errors():
        for _ in stream:
            pass
    assert ended.value.code is ErrorCode.DEADLINE_EXCEEDED
