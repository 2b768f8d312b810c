"""A server that stops says nothing but what it has to say."""

from __future__ import annotations

import gc
import logging
import os
import signal
import threading

import pytest

from gym_fed.config.serving import ServingConfig
from gym_fed.serving.http.server import run_server

pytestmark = pytest.mark.skipif(os.name == "nt", reason="signals of Unix")


def test_a_stop_by_a_signal_leaves_no_error_behind(caplog: pytest.LogCaptureFixture) -> None:
    config = ServingConfig(base="gym-nano", variants=None, device="cpu", num_threads=1, port=0)
    with caplog.at_level(logging.ERROR, logger="asyncio"):
        finished = run_server(config, on_ready=lambda *_: os.kill(os.getpid(), signal.SIGTERM))
        gc.collect()
    assert finished
    assert threading.current_thread() is threading.main_thread()
    assert [record for record in caplog.records if record.name == "asyncio"] == []
