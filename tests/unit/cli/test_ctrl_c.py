"""What the first and the second Ctrl-C or SIGTERM do to long work, with real signals to this process."""

from __future__ import annotations

import os
import signal
import time

import pytest

from gym_fed.cli.train.progress import stop_on_ctrl_c
from gym_fed.core.errors import ErrorCode, GymError

STOPPED = GymError(ErrorCode.INTERRUPTED, "stopped at step 3", "run it again")


def work(*signals: int, ending: GymError = STOPPED) -> None:
    """Get signals, then end with an error."""
    with stop_on_ctrl_c() as should_stop:
        assert not should_stop()
        for number in signals:
            os.kill(os.getpid(), number)
        assert should_stop()
        raise ending


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, ErrorCode.INTERRUPTED), (signal.SIGTERM, ErrorCode.TERMINATED)]
)
def test_the_first_signal_requests_a_stop_and_gives_its_exit_code(
    number: signal.Signals, code: ErrorCode
) -> None:
    with pytest.raises(GymError, match="stopped at step 3") as caught:
        work(number)
    assert (caught.value.code, caught.value.hint) == (code, "run it again")
    assert caught.value.exit_code == 128 + number


def test_the_second_signal_stops_at_once_and_the_last_one_gives_the_exit_code() -> None:
    with pytest.raises(KeyboardInterrupt):
        work(signal.SIGTERM, signal.SIGINT)
    with pytest.raises(GymError, match="at once by SIGTERM") as caught:
        work(signal.SIGINT, signal.SIGTERM)
    assert caught.value.code is ErrorCode.TERMINATED


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_before_the_first_step_stops_at_once(number: signal.Signals) -> None:
    def load_forever() -> None:
        with stop_on_ctrl_c():
            os.kill(os.getpid(), number)
            time.sleep(60)

    with pytest.raises(GymError if number == signal.SIGTERM else KeyboardInterrupt):
        load_forever()


def test_a_signal_is_kept_when_nobody_reads_what_it_prints(monkeypatch: pytest.MonkeyPatch) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as broken, stop_on_ctrl_c() as should_stop:
        monkeypatch.setattr("sys.stderr", broken)
        assert not should_stop()
        os.kill(os.getpid(), signal.SIGINT)
        assert should_stop()


def test_handlers_and_other_errors_are_left_as_they_were() -> None:
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    other = GymError(ErrorCode.DATA_INVALID, "a row")
    with pytest.raises(GymError) as caught:
        work(signal.SIGTERM, ending=other)
    assert caught.value is other
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before
