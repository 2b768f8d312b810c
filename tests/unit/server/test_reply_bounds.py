"""What a reply may name, check by check: the hub's process is in danger only where one of them is gone."""

from __future__ import annotations

from typing import Any

import pytest
from gym_server.rounds.replies import EXPANSION, MAX_REASON, MAX_RECORDS_BYTES, check_reply

from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.trust.wire.limits import DELTA_STYPE
from gym_fed.trust.wire.v1 import hub_pb2 as pb

BYTES = 1 << 20
CAP = 1 << 30


def array(number: int, size: int = BYTES, **changes: Any) -> pb.ArrayRef:
    fields = {"name": f"a{number}", "dtype": "uint8", "shape": [size - 128], "stype": "numpy.ndarray"}
    return pb.ArrayRef(**{**fields, "sha256": f"{number:064x}", "size_bytes": size, **changes})


def records(*refs: pb.ArrayRef) -> pb.Records:
    content = pb.Records(order=["arrays"])
    content.arrays["arrays"].arrays.extend(refs)
    return content


def update(*refs: pb.ArrayRef) -> pb.Records:
    content = records(*refs)
    content.order.append("update")
    content.configs["update"].entries.add(key="manifest", value=pb.Value(text="{}"))
    return content


TASK = records(*(array(number) for number in range(8)))


def answer(content: pb.Records, task: pb.Records = TASK, cap: int = CAP, size: int = BYTES) -> None:
    check_reply(task, pb.SubmitRequest(message_id="m", content=content), cap, lambda _: size)


def refusal(*arguments: Any, **options: Any) -> GymError:
    with pytest.raises(GymError) as caught:
        answer(*arguments, **options)
    return caught.value


def test_a_reply_may_be_a_few_times_its_task_and_no_more() -> None:
    answer(records(*(array(number) for number in range(8 * EXPANSION))))
    error = refusal(records(*(array(number) for number in range(8 * EXPANSION + 1))))
    assert (error.code, f"allows {8 * EXPANSION}" in error.message) == (ErrorCode.TOO_LARGE, True)


def test_few_references_to_large_objects_are_held_against_the_tasks_bytes_and_the_hubs_cap() -> None:
    large = records(array(1, 9 * EXPANSION * BYTES))
    error = refusal(large, size=9 * EXPANSION * BYTES)
    assert (error.code, f"allows {8 * EXPANSION * BYTES}" in error.message) == (ErrorCode.TOO_LARGE, True)
    assert "allows 4096" in refusal(records(array(0, 5000)), cap=4096, size=5000).message


def test_an_object_is_named_as_often_as_the_task_names_one_and_not_again() -> None:
    error = refusal(records(array(1), array(1)))
    assert (error.code, "2 times" in error.message) == (ErrorCode.UPDATE_REFUSED, True)
    answer(records(array(1), array(1)), records(array(7), array(7)))
    assert "3 times" in refusal(records(*[array(1)] * 3), records(array(7), array(7))).message


def test_what_is_declared_is_held_against_shape_dtype_and_the_object() -> None:
    assert "the object has" in refusal(records(array(1)), size=BYTES - 1).message
    assert "make" in refusal(records(array(1, shape=[2 * BYTES]))).message
    assert "make" in refusal(records(array(1, shape=[1]))).message
    assert "dimensions" in refusal(records(array(1, shape=[1] * 33))).message
    assert "dtype" in refusal(records(array(1, dtype="O"))).message
    assert "shape" in refusal(records(array(1, stype=DELTA_STYPE, shape=[1]))).message


def test_deltas_that_a_plain_reply_names_count_like_its_arrays() -> None:
    """They are not charged to the account's quota, so the task must bound them."""
    delta = array(1, stype=DELTA_STYPE, size_bytes=CAP + 1, shape=[CAP + 1])
    assert "its task allows" in refusal(records(delta), size=CAP + 1).message


def test_an_update_is_one_delta_and_nothing_beside_it() -> None:
    delta = array(1, stype=DELTA_STYPE, shape=[BYTES])
    answer(update(delta))
    for content in (update(), update(delta, array(2)), update(array(1))):
        error = refusal(content)
        assert (error.code, "one delta" in error.message) == (ErrorCode.UPDATE_REFUSED, True)


def test_records_and_reasons_have_a_length() -> None:
    content = records(*(array(number, name="n" * 100_000) for number in range(3)))
    assert content.ByteSize() > MAX_RECORDS_BYTES
    assert refusal(content).code is ErrorCode.TOO_LARGE
    for length, fits in ((MAX_REASON, True), (MAX_REASON + 1, False)):
        failed = pb.SubmitRequest(error=pb.ReplyError(code=1, reason="x" * length))
        if fits:
            check_reply(TASK, failed, CAP, lambda _: BYTES)
        else:
            with pytest.raises(GymError):
                check_reply(TASK, failed, CAP, lambda _: BYTES)
