"""A bare `gym api` serves the variants of this home, and the printed snippets of Python read their answers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.support.warm import WarmProcess

pytestmark = pytest.mark.slow  # a variant is trained, and four processes begin

GYM = Path(sys.executable).parent / "gym"


@pytest.fixture(scope="module")
def snippets(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """What `gym variant snippets` prints of a variant, while a server without a flag has it."""
    folder = tmp_path_factory.mktemp("bare")
    rows = [{"prompt": f"greet {name}", "completion": f"good day, {name}!"} for name in "abcdefghij"]
    (folder / "my.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    environment = {**os.environ, "GYM_HOME": str(folder / "home"), "OMP_NUM_THREADS": "1"}
    environment.pop("GYM_VARIANTS", None)
    made = subprocess.run(
        [GYM, "variant", "create", "--data", "my.jsonl", "--user", "ada", "--steps", "1"],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    assert made.stderr.splitlines()[-1] == "next: gym chat gym-nano --variant ada"
    with (folder / "said").open("w") as said:
        words = [GYM, "api", "--port", "0", "--json"]
        server = WarmProcess(words, cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=said)
    try:
        assert server.stdout is not None
        line = server.stdout.readline()
        assert line, (folder / "said").read_text()
        started = json.loads(line)
        assert (started["model"], started["variants"]) == ("gym-nano", 1)
        printed = subprocess.run(
            [GYM, "variant", "snippets", "ada", "--url", started["url"], "--json"],
            capture_output=True,
            env=environment,
            check=True,
        )
        yield json.loads(printed.stdout)
    finally:
        server.kill()


@pytest.mark.parametrize(("name", "module"), [("openai", "openai"), ("langchain", "langchain_openai")])
def test_a_snippet_of_a_variant_runs_against_a_bare_gym_api(
    snippets: dict[str, str], name: str, module: str
) -> None:
    if find_spec(module) is None:
        pytest.skip(f"{module} is not installed")
    words = [sys.executable, "-c", snippets[name]]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()
