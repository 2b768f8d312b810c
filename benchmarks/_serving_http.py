"""Servers as real processes under the same client: `gym api` with variants, `transformers serve` on the base."""

from __future__ import annotations

import asyncio
import json
import os
import re
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import psutil
from _serving_sides import Load, Speeds, require_ran

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from demo.end_together import end_together

BIN = Path(sys.executable).parent
START_SECONDS = 180.0


@dataclass(frozen=True)
class Served:
    """A server that is stopped (SIGSTOP) but while it is measured, so that an idle one takes nothing of the cores."""

    address: str
    process: psutil.Process

    @contextmanager
    def awake(self) -> Iterator[None]:
        """Let it run within the block."""
        family = [self.process, *self.process.children(recursive=True)]
        for one in family:
            one.resume()
        try:
            yield
        finally:
            for one in family:
                one.suspend()


@contextmanager
def server(command: Sequence[str], port: int, log: Path) -> Iterator[Served]:
    """A server as a process of its own; its output goes to ``log``."""
    end_together()
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
    with log.open("wb") as output:
        process = psutil.Popen(command, stdout=output, stderr=subprocess.STDOUT, env=environment)
    served = Served(f"http://127.0.0.1:{port}", psutil.Process(process.pid))
    try:
        _wait(process, command, served.address, log)
        with served.awake():
            pass
        yield served
    finally:
        for one in (*served.process.children(recursive=True), served.process):
            one.resume()
        process.terminate()
        try:
            process.wait(30)
        except psutil.TimeoutExpired:
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


def gym_api(folder: Path, variants: Path, port: int, kernel: str) -> list[str]:
    """Ours, with as many variants as the store has."""
    words = [str(BIN / "gym"), "api", "--base", str(folder), "--variants", str(variants), "--port", str(port)]
    settings = ("dtype=bfloat16", "device=cpu", "served_name=base", "require_signature=false")
    for setting in (*settings, f"engine.kernel={kernel}", "engine.max_batch_tokens=1024"):
        words += ["--set", setting]
    return words


@dataclass(frozen=True)
class GymApiSide:
    """`gym api`, user ``i`` with variant ``v``i`` or everybody with the base; its metrics show what ran."""

    served: Served
    kernel: str | None

    def __call__(self, load: Load, speeds: Speeds) -> None:
        """One turn.

        Raises:
            RuntimeError: When other kernels ran than ``kernel``, or other rows than a variant's.
        """
        models = ["base" if self.kernel is None else f"base:v{user}" for user in range(load.users)]
        with self.served.awake():
            before = self._counts()
            ask_all(self.served.address, load, models, speeds)
            ran = self._counts()
        ran.subtract(before)
        require_ran(self.kernel, Counter({kind: ran[kind] for kind in ("exact", "lookup", "decoded")}))
        if ran["rows with variants"] != (ran["rows"] if self.kernel is not None else 0):
            raise RuntimeError(f"of {ran['rows']} rows {ran['rows with variants']} had a variant")
        speeds.ran.update(ran)

    def _counts(self) -> Counter[str]:
        text = httpx.get(f"{self.served.address}/metrics", timeout=30.0).text
        found = re.findall(r'^gym_engine_sign_products_total\{kernel="(\w+)"\} (\S+)$', text, re.MULTILINE)
        rows = re.findall(r"^gym_engine_(rows(?:_with_variants)?)_total (\S+)$", text, re.MULTILINE)
        return Counter({name.replace("_", " "): int(float(count)) for name, count in (*found, *rows)})


@dataclass(frozen=True)
class PeerSide:
    """`transformers serve` on the base."""

    served: Served
    model: Path

    def __call__(self, load: Load, speeds: Speeds) -> None:
        """One turn."""
        with self.served.awake():
            ask_all(self.served.address, load, [str(self.model)] * load.users, speeds)
        speeds.ran.update({"requests": load.users})


def ask_all(address: str, load: Load, models: Sequence[str], speeds: Speeds) -> None:
    """All users at once, streamed.

    Raises:
        RuntimeError: When an answer has not the length that was asked for.
    """
    prompts = [" ".join(f"w{token}" for token in prompt) for prompt in load.prompts()]
    started = time.perf_counter()
    found = asyncio.run(_ask_all(address, load, models, prompts))
    seconds = time.perf_counter() - started
    if any(tokens != load.new for tokens, _ in found):
        raise RuntimeError(
            f"{models[0]}: answers of {[tokens for tokens, _ in found]} tokens, not {load.new}"
        )
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
            if any(choice.get("text") for choice in chunk.get("choices", ())):
                first = first or time.perf_counter() - started
                pieces += 1
            counted = (chunk.get("usage") or {}).get("completion_tokens", counted)
    return counted or pieces, first


def _wait(process: psutil.Popen, command: Sequence[str], address: str, log: Path) -> None:
    until = time.monotonic() + START_SECONDS
    while time.monotonic() < until:
        if process.poll() is not None:
            break
        try:
            ready = httpx.get(f"{address}/ready", timeout=2.0).status_code
            if ready in (200, 404):  # the peer has no such page: 404 is life enough
                return
        except httpx.TransportError:
            pass
        time.sleep(0.2)
    raise RuntimeError(f"{' '.join(command)} did not start: {log.read_text()[-1500:]}")
