"""The start of `gym api`: it listens before it loads."""

from __future__ import annotations

import gc
import inspect
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

from gym_fed.cli.main import app
from gym_fed.config.serving import ServingConfig
from gym_fed.serving.engines.base import EngineDescription
from gym_fed.serving.http import server
from tests.support.wait import SECONDS


def test_a_server_listens_before_it_loads_torch_and_never_reads_the_schemas_of_training() -> None:
    modules = "gym_fed.serving.http.server, gym_fed.serving.store.store, gym_fed.base.downloads.ensure"
    heavy = {"torch", "transformers", "gym_fed.config.train.training"}
    program = f"import sys, {modules}; print({heavy} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


@pytest.mark.parametrize(
    ("words", "noted"), [([], True), (["--set", "variants=null"], False)], ids=["not said", "without"]
)
def test_a_start_before_the_first_variant_says_that_it_will_not_be_served(
    words: list[str], noted: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ready = SimpleNamespace(
        served_name="gym-nano",
        store=None,
        base=SimpleNamespace(digest="sha256:"),
        description=EngineDescription("own", "bfloat16", prefix_cache=True),
        service=SimpleNamespace(sampling_defaults={}, reasoning_parser="none"),
        config=ServingConfig(),
    )

    def run(settings: ServingConfig, *, on_ready: Callable[[str, object], None], **more: object) -> bool:
        on_ready("http://127.0.0.1:1", ready)
        return True

    monkeypatch.setattr("gym_fed.serving.http.server.run_server", run)
    monkeypatch.setenv("GYM_HOME", str(tmp_path))
    try:
        result = CliRunner().invoke(app, ["api", "--json", *words])
    finally:
        gc.unfreeze()
    assert result.exit_code == 0
    assert ("there are no local variants yet" in result.stderr) == noted


_STOPPED = """
import atexit, os, threading
import gym_fed.serving.http.server as server
from gym_fed.cli.main import main

def run(settings, **callbacks):
    threading.Thread(target=threading.Event().wait, name=os.environ["THREAD"], daemon=True).start()
    return True

atexit.register(print, "Python's own end")
server.run_server = run
main()
"""


@pytest.mark.parametrize(("thread", "said"), [("gym-api-load", ""), ("another", "Python's own end")])
def test_a_server_that_is_stopped_while_it_loads_does_not_wait_for_pythons_own_end(
    thread: str, said: str, tmp_path: Path
) -> None:
    assert f'name="{thread}"' in inspect.getsource(server) or said
    done = subprocess.run(
        [sys.executable, "-c", _STOPPED, "api", "--base", "gym-nano"],
        capture_output=True,
        text=True,
        timeout=SECONDS,
        env={**os.environ, "GYM_HOME": str(tmp_path), "THREAD": thread},
    )
    assert (done.returncode, done.stdout.strip()) == (0, said), done.stderr
