"""Every example runs as its first lines say, in a process of its own and an empty folder."""

from __future__ import annotations

import asyncio
import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.support.wait import SECONDS

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
SHOWN = {
    "aggregator": "interquartile_mean",
    "dpo_variant": "gym-nano:ada says",
    "export_gguf": "largest difference of a weight",
    "federate": "round 2: merged ada, ben, cleo",
    "grpo": "saved in",
    "langchain_chat": "streamed:",
    "privacy": "epsilon 7.",
    "serve": "gym-nano:ada says",
    "soup": "nats on both tasks",
    "train": "double: stone ->",
}
"""The end of what each prints, or a part that shows that it worked. ``mcp_server`` speaks a protocol instead."""
NEEDS = {"langchain_chat": "langchain_openai", "export_gguf": "gguf", "privacy": "opacus", "serve": "openai"}
QUICK = ("aggregator",)
FILES = [
    pytest.param(
        name,
        marks=[
            *([] if name in QUICK else [pytest.mark.slow]),  # they train, or start a server
            *(
                [pytest.mark.skip(reason=f"{NEEDS[name]} is not installed")]
                if name in NEEDS and find_spec(NEEDS[name]) is None
                else []
            ),
        ],
    )
    for name in SHOWN
]


@pytest.mark.parametrize("name", FILES)
def test_an_example_runs_and_shows_what_it_is_about(name: str, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, EXAMPLES / f"{name}.py", "folder"],
        cwd=tmp_path,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=4 * SECONDS,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert SHOWN[name] in done.stdout
    assert {file.name for file in tmp_path.iterdir()} <= {"folder", "folder-ada.jsonl"}


def test_every_example_is_run_short_and_says_how_to_run_it() -> None:
    files = {file.stem: file.read_text(encoding="utf-8") for file in EXAMPLES.glob("*.py")}
    assert files.keys() == SHOWN.keys() | {"mcp_server"}
    for name, text in files.items():
        assert len(text.splitlines()) < 80, name
        assert f"python examples/{name}.py" in text.split('"""')[1], name
        named = re.findall(r"pip install (?:'gym-fed\[)?([\w-]+)", text)
        assert named or name not in NEEDS, name


@pytest.mark.slow  # trains in a process beside the server
@pytest.mark.skipif(
    find_spec("mcp") is None, reason="mcp, the SDK of the Model Context Protocol, is not installed"
)
def test_the_mcp_server_offers_tools_that_train_and_answer(tmp_path: Path) -> None:
    asyncio.run(_speak(tmp_path))


async def _speak(folder: Path) -> None:
    from mcp import Client, StdioServerParameters  # type: ignore[import-not-found, unused-ignore]

    server = StdioServerParameters(
        command=sys.executable,
        args=[str(EXAMPLES / "mcp_server.py"), str(folder / "runs")],
        env=dict(os.environ),
        cwd=str(folder),
    )
    async with Client(server) as client:
        tools = (await client.list_tools()).tools
        assert {tool.name for tool in tools} == {"train", "status", "ask"}
        assert _text(await client.call_tool("ask", {"text": "copy: abc"})).startswith("abc")
        assert "2000 at most" in _text(await client.call_tool("ask", {"text": "copy: " + "a" * 2000}))
        assert "no task" in _text(await client.call_tool("train", {"task": "../x"}))
        assert "1 to 500" in _text(await client.call_tool("train", {"task": "double", "max_steps": 501}))
        for task in ("double", "shout"):
            assert "began" in _text(await client.call_tool("train", {"task": task, "max_steps": 12}))
        assert "may train at once" in _text(await client.call_tool("train", {"task": "dash"}))
        for _ in range(300):
            if '"running":true' not in _text(await client.call_tool("status", {})).replace(" ", ""):
                break
            await asyncio.sleep(0.5)
        figures = folder / "runs" / "double" / "metrics.jsonl"
        with open(figures, "a", encoding="utf-8") as stream:
            stream.write(
                '{"step": 99}\n' * 10_000 + '{"step": 100, "lo'
            )  # and half a line, as a run may leave it
        assert '"step":99' in _text(await client.call_tool("status", {})).replace(" ", "")
        assert _text(await client.call_tool("ask", {"text": "double: ab", "model": "double"}))
        assert "not trained" in _text(await client.call_tool("ask", {"text": "x", "model": "/etc"}))


def _text(result: Any) -> str:
    assert not result.is_error, result
    return "".join(part.text for part in result.content)
