"""Two servers as real processes under the same client: `gym api` with variants, `transformers serve` on the base."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import httpx
from _serving_sides import Load, Speeds

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from demo.end_together import end_together

BIN = Path(sys.executable).parent
START_SECONDS = 180.0


@contextmanager
def server(command: Sequence[str], port: int, log: Path) -> Iterator[str]:
    """The address of a server that runs within the block; its output goes to ``log``."""
    end_together()
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, env=environment)
    address = f"http://127.0.0.1:{port}"
    try:
        _wait(process, address, log)
        yield address
    finally:
        process.terminate()
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()


def free_port() -> int:
    """A port of loopback that nobody had a moment ago."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def transformers_serve(folder: Path, port: int, continuous: bool) -> list[str]:
    """The peer, on the same weights and dtype."""
    words = [str(BIN / "transformers"), "serve", str(folder), "--dtype", "bfloat16", "--device", "cpu"]
    words += ["--host", "127.0.0.1", "--port", str(port)]
    return words + (["--continuous-batching", "--cb-num-blocks", "512"] if continuous else [])


def gym_api(folder: Path, variants: Path, port: int) -> list[str]:
    """Ours, with as many variants as the store has."""
    words = [str(BIN / "gym"), "api", "--base", str(folder), "--variants", str(variants), "--port", str(port)]
    for setting in ("dtype=bfloat16", "device=cpu", "served_name=base", "require_signature=false"):
        words += ["--set", setting]
    return words


def ask_all(address: str, load: Load, models: Sequence[str], speeds: Speeds) -> None:
    """All users at once, streamed."""
    prompts = [" ".join(f"w{token}" for token in prompt) for prompt in load.prompts()]
    started = time.perf_counter()
    found = asyncio.run(_ask_all(address, load, models, prompts))
    seconds = time.perf_counter() - started
    speeds.add(sum(tokens for tokens, _ in found), seconds, [first for _, first in found])


async def _ask_all(
    address: str, load: Load, models: Sequence[str], prompts: Sequence[str]
) -> list[tuple[int, float]]:
    async with httpx.AsyncClient(timeout=600.0, limits=httpx.Limits(max_connections=None)) as client:
        return await asyncio.gather(
            *(_ask(client, address, load, m, p) for m, p in zip(models, prompts, strict=True))
        )


async def _ask(
    client: httpx.AsyncClient, address: str, load: Load, model: str, prompt: str
) -> tuple[int, float]:
    body = {"model": model, "prompt": prompt, "max_tokens": load.new, "temperature": 0, "stream": True}
    body["stream_options"] = {"include_usage": True}
    started, first, pieces, counted = time.perf_counter(), 0.0, 0, 0
    async with client.stream("POST", f"{address}/v1/completions", json=body) as response:
        if response.status_code != 200:
            raise RuntimeError(f"{model}: {response.status_code} {(await response.aread())[:400]!r}")
        async for line in response.aiter_lines():
            if not line.startswith("data:") or line.endswith("[DONE]"):
                continue
            chunk = json.loads(line[5:])
            first = first or time.perf_counter() - started
            pieces += len(chunk.get("choices", ()))
            counted = (chunk.get("usage") or {}).get("completion_tokens", counted)
    return counted or pieces, first


def _wait(process: subprocess.Popen[bytes], address: str, log: Path) -> None:
    until = time.monotonic() + START_SECONDS
    while time.monotonic() < until:
        if process.poll() is not None:
            break
        try:
            ready = httpx.get(
                f"{address}/ready", timeout=2.0
            ).status_code  # which the peer has not: 404 is life enough
            if ready in (200, 404):
                return
        except httpx.TransportError:
            pass
        time.sleep(0.2)
    raise RuntimeError(f"{' '.join(map(str, process.args))} did not start: {log.read_text()[-1500:]}")
