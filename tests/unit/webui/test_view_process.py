"""The child process that reads data for pages: how many requests wait for it."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.webui.view_process import MAX_WAITING, ViewProcess
from tests.support.wait import until


def test_requests_of_one_page_leave_threads_for_all_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, answers = threading.Semaphore(0), threading.Event()

    def asked(self: ViewProcess, request: bytes, seconds: float) -> bytes:
        begun.release()
        answers.wait()
        return b'{"answer": {}}'

    monkeypatch.setattr(ViewProcess, "_asked", asked)
    views = ViewProcess("no:Views", tmp_path)
    with ThreadPoolExecutor(MAX_WAITING) as threads:
        waiting = [threads.submit(views.ask, {}) for _ in range(MAX_WAITING)]
        try:
            until(lambda: begun._value == MAX_WAITING)
            with pytest.raises(GymError, match="wait") as refused:
                views.ask({})
        finally:
            answers.set()
    assert refused.value.code is ErrorCode.BUSY
    assert all(one.result() == {} for one in waiting)
    assert views.ask({}) == {}
