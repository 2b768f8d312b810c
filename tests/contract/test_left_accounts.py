"""An account that has left: it still reads and moves what it earned, and can do nothing else."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from gym_client.hub.known import enrolled_client
from gym_client.hub.transport import HubClient
from gym_server.store.tables import nodes
from sqlalchemy import select

from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.trust.wire.v1 import hub_pb2 as pb
from tests.support.loopback_hub import LoopbackHub
from tests.support.postgres import database_url
from tests.support.quick import quick


@pytest.fixture(scope="module", params=quick(["sqlite", "postgresql"], "sqlite"))
def hub(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LoopbackHub]:
    storage = {"database": database_url(request)}
    found = LoopbackHub(tmp_path_factory.mktemp("left") / "hub", storage=storage)
    yield found
    found.close()


@pytest.fixture
def left(hub: LoopbackHub, tmp_path: Path) -> Iterator[HubClient]:
    """A contributor who was here, with a session of before, and left."""
    client = hub.client(tmp_path / "ann")
    client.call("Account", pb.AccountRequest())
    client.call("Leave", pb.LeaveRequest())
    client.forget_enrolment()
    yield client
    client.close()


def code_of(client: HubClient, method: str, request: object) -> ErrorCode:
    with pytest.raises(GymError) as caught:
        client.call(method, request)
    return caught.value.code


def test_the_hub_still_reports_the_balance(left: HubClient) -> None:
    reply = left.call("Account", pb.AccountRequest())
    assert reply.status == "left"
    assert reply.contributor == left.pin.left
    assert reply.balance == 0


def test_the_ledger_can_be_read_and_a_transfer_is_judged_by_its_content(left: HubClient) -> None:
    with left.errors():
        kinds = [entry.kind for entry in left.stream("Ledger", pb.LedgerRequest(), 30)]
    assert kinds[-1] == "left"
    assert code_of(left, "Transfer", pb.TransferRequest(statement_json="{}")) is not ErrorCode.UNAUTHENTICATED


@pytest.mark.parametrize(
    ("method", "request_"),
    [
        ("Heartbeat", pb.HeartbeatRequest(message_id="m1")),
        ("BeginUpload", pb.BeginUploadRequest(sha256="0" * 64, size_bytes=1)),
        ("Submit", pb.SubmitRequest(message_id="m1")),
        ("ListVariants", pb.ListVariantsRequest()),
        ("PutVariant", pb.PutVariantRequest()),
        ("Leave", pb.LeaveRequest()),
    ],
)
def test_everything_else_is_refused(left: HubClient, method: str, request_: object) -> None:
    assert code_of(left, method, request_) is ErrorCode.UNAUTHENTICATED


@pytest.mark.parametrize("method", ["Work", "Download"])
def test_streams_of_work_and_objects_are_refused(left: HubClient, method: str) -> None:
    request = pb.WorkRequest() if method == "Work" else pb.DownloadRequest(sha256="0" * 64)
    with pytest.raises(GymError) as caught, left.errors():
        list(left.stream(method, request, 30))
    assert caught.value.code is ErrorCode.UNAUTHENTICATED


def test_a_session_of_before_ends_with_the_leaving_and_one_of_after_with_the_return(
    hub: LoopbackHub, tmp_path: Path
) -> None:
    client = hub.client(tmp_path / "ann")
    before = client._session
    client.call("Leave", pb.LeaveRequest())
    client.forget_enrolment()
    client.call("Account", pb.AccountRequest())
    after = client._session
    with pytest.raises(GymError) as caught:
        hub.fed.accounts.session(before)
    assert caught.value.code is ErrorCode.UNAUTHENTICATED
    assert hub.fed.accounts.session(after).has_left
    client.enrol("ann")
    with pytest.raises(GymError) as caught:
        hub.fed.accounts.session(after)
    assert caught.value.code is ErrorCode.UNAUTHENTICATED
    client.renew_session()
    client.call("BeginUpload", pb.BeginUploadRequest(sha256="0" * 64, size_bytes=1))
    client.close()


def test_without_asking_for_it_a_left_account_gets_no_session_and_with_it_no_node(
    hub: LoopbackHub, left: HubClient
) -> None:
    left.call("Account", pb.AccountRequest())
    assert left.node_id == 0
    with hub.fed.database.reading() as tx:
        assert (
            len(tx.execute(select(nodes).where(nodes.c.contributor == left.pin.left)).all()) == 1
        )  # of before
    left._repin(contributor=left.pin.left, left="")  # another machine with this key, which did not hear of it
    left.renew_session()
    assert code_of(left, "Account", pb.AccountRequest()) is ErrorCode.UNAUTHENTICATED


def test_a_client_that_did_not_leave_itself_asks_the_hub_whether_its_account_did(
    hub: LoopbackHub, tmp_path: Path
) -> None:
    with hub.client(tmp_path / "ann") as client, HubClient(client.home, client.address, client.pin) as other:
        contributor = client.pin.contributor
        assert not client.note_leaving()
        assert client.pin.contributor == contributor
        other.call("Leave", pb.LeaveRequest())
        assert code_of(client, "Heartbeat", pb.HeartbeatRequest(message_id="m1")) is ErrorCode.UNAUTHENTICATED
        assert client.note_leaving()
        assert (client.pin.contributor, client.pin.left) == ("", contributor)
        assert client.call("Account", pb.AccountRequest()).status == "left"


def test_status_after_leave_needs_no_server(left: HubClient) -> None:
    with enrolled_client(left.home, None, False, may_have_left=True) as client:
        assert client.call("Account", pb.AccountRequest()).status == "left"
