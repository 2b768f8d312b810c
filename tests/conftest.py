"""Fixtures of the whole suite."""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "2")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import gc
import logging
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from demo.end_together import end_together
from gym_fed.base.downloads import requests as download_requests
from gym_fed.core import child_process
from tests.support import memory_folder
from tests.support import postgres as _postgres
from tests.support.quick import mark_beyond_few
from tests.support.rooms import seconds_by_room

memory_folder.use_memory()
end_together()  # a suite that is killed leaves no hub and no contributor behind

# No test measures time: on a busy machine a short example takes longer than Hypothesis expects.
settings.register_profile(
    "suite", deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture]
)
settings.load_profile("suite")

# A suite in the background of a script ignores Ctrl-C, and its children would inherit that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# With other test processes on all cores, a process of low priority gets no time.
child_process._LOW_PRIORITY = 0

# Many configs name a public model, whose size is asked for: where there is no network, each would wait for the retry.
download_requests.RETRY_SECONDS = 0.01

SHARED = Path(__file__).resolve().parents[2] / "shared"


def pytest_configure(config: pytest.Config) -> None:
    """Let all workers of a run share one process that imports the libraries."""
    if config.getoption("numprocesses", None) and "GYM_TESTS_WARM" not in os.environ:
        from tests.support import warm

        warm.start_for_workers()


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[Any]:
    """Collect no garbage while tests are: a million objects of libraries are made, and stay."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Apply the marker ``few`` before pytest applies ``-m``."""
    mark_beyond_few(items)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    """Seed what PEFT and torch draw, before the fixtures of any scope, so that no result depends on chance."""
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(0)


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Print how long each room took; two workers need half of it."""
    reports = [report for found in terminalreporter.stats.values() for report in found]
    if len(seconds := seconds_by_room(reports)) > 1:
        terminalreporter.section("seconds of tests by room")
        for room, taken in seconds.items():
            terminalreporter.write_line(f"{taken:7.0f} {room}")


@pytest.fixture(scope="module", autouse=True)
def _home_of_nobody(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Commands find keys and variants in their home without a flag: every file of tests begins with an empty one."""
    os.environ["GYM_HOME"] = str(tmp_path_factory.mktemp("home"))
    os.environ.pop("GYM_VARIANTS", None)


@pytest.fixture(scope="module", autouse=True)
def _libraries_are_no_garbage() -> None:
    """Trainers and Flower collect garbage again and again; each time a million objects of libraries are looked at."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _working_folder_on_the_path() -> None:
    """A command that ran in this process shut the working folder out of all later child processes."""
    os.environ.pop("PYTHONSAFEPATH", None)


@pytest.fixture(autouse=True)
def _loggers_as_found() -> Iterator[None]:
    """A command that runs in this process writes its loggers to standard error, where ``caplog`` sees nothing."""
    names = ("", "asyncio", "grpc", "gym_client", "gym_fed", "gym_server", "opentelemetry", "uvicorn")
    loggers = [logging.getLogger(name) for name in names]
    found = [(logger, logger.level, logger.propagate, logger.handlers[:]) for logger in loggers]
    yield
    for logger, level, propagate, handlers in found:
        logger.setLevel(level)
        logger.propagate = propagate
        # pytest adds handlers of its own to the root and removes them itself
        for handler in [h for h in logger.handlers if h not in handlers and logger.name != "root"]:
            logger.removeHandler(handler)


@pytest.fixture(scope="module")
def warm_children(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Child processes that this project starts have imported it already."""
    from tests.support import warm

    with warm.warm_children(tmp_path_factory.mktemp("python")):
        yield


@pytest.fixture(scope="session")
def shared_folder() -> Path:
    """The team's models and data."""
    if not SHARED.is_dir():
        pytest.skip(f"{SHARED} is absent: no shared models and data on this machine")
    return SHARED


@pytest.fixture(scope="session")
def tiny_base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A byte-level model of a few thousand random weights, as a folder: rounds with it take a moment."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    from gym_fed.base.models import load_tokenizer

    torch.manual_seed(0)
    tokenizer = load_tokenizer("gym-nano")
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=16,
        intermediate_size=36,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        max_position_embeddings=128,
        tie_word_embeddings=True,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    folder = tmp_path_factory.mktemp("models") / "tiny"
    Qwen3ForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def postgres() -> Iterator[_postgres.PostgresServer]:
    """A PostgreSQL server that ends with the tests."""
    if reason := _postgres.why_not():
        pytest.skip(reason)
    server = _postgres.PostgresServer()
    yield server
    server.close()


@pytest.fixture(params=["sqlite", "postgresql"])
def database_url(request: pytest.FixtureRequest) -> str:
    """A new database of each kind that a hub runs on."""
    return _postgres.database_url(request)
