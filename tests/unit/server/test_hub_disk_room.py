"""A full disk ends no round, whichever library reports it and in whatever form."""

from __future__ import annotations

import errno

import pytest
from gym_server.store.room import raise_if_full

from gym_fed.core.errors import ErrorCode, GymError


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.ENOSPC, "No space left on device"),
        OSError(errno.EDQUOT, "Disk quota exceeded"),
        RuntimeError("[enforce fail] PytorchStreamWriter failed writing file data/0"),
        Exception("I/O error: No space left on device (os error 28)"),
        GymError(ErrorCode.DISK_FULL, "no space is left for soup-1"),
    ],
)
def test_a_full_disk_is_the_systems_error_after_which_a_round_continues(error: Exception) -> None:
    with pytest.raises(OSError, match=r"\[Errno 28\]") as caught:
        raise_if_full(error)
    assert caught.value.errno == errno.ENOSPC


@pytest.mark.parametrize(
    "error", [ValueError("x"), GymError(ErrorCode.INTERNAL, "x"), OSError(errno.EIO, "x")]
)
def test_any_other_error_passes(error: Exception) -> None:
    raise_if_full(error)
