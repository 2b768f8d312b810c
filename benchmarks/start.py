"""Starts of `gym api`: seconds from the typed command to the first answer, and peak memory against the libraries'.

    python benchmarks/start.py [--quick] [--json] [--plot FILE] [--part seconds|memory] [--model FOLDER] [--runs N]

``seconds``: wall and CPU time of gym-nano, in separate processes, until `/health`, the first answer, and the answer to
a chat after that. The peer is the import of PyTorch alone, in a separate process.

``memory``: a bfloat16 model folder served as ``auto``, ``int8`` and ``int4``; the latter two are packed at the start or
read from the file of packed weights. A process serves gym-nano once, which loads the libraries, reads the model's
tokenizer, and records its memory. It then opens a server's parts for the model, and answers once. The peak increase is
divided by the weights' bytes in bfloat16.
"""

from __future__ import annotations

import json
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import psutil
from _peer import child, script
from _report import Report, options

PARTS = ("seconds", "memory")
AIM_SECONDS, AIM_PEAK = 1.5, 1.1
STARTS = ("auto", "int8, packed", "int8, stored", "int4, packed", "int4, stored")
_ADDRESS = re.compile(rb"listening at (http://\S+?);")


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--part", choices=PARTS, action="append", help="default: all")
    parser.add_argument("--model", type=Path, metavar="FOLDER", help="of the part memory")
    parser.add_argument("--runs", type=int, default=3)
    arguments = parser.parse_args()
    runs = 1 if arguments.quick else arguments.runs
    report = Report("start", peer="import torch")
    with tempfile.TemporaryDirectory(prefix="gym-start-") as home:
        environment = {**os.environ, "GYM_HOME": home, "OMP_NUM_THREADS": "1"}
        if "seconds" in (arguments.part or PARTS):
            seconds(report, environment, runs)
        if arguments.model is not None and "memory" in (arguments.part or PARTS):
            memory(report, environment, runs, str(arguments.model))
    report.finish(arguments)


def seconds(report: Report, environment: dict[str, str], runs: int) -> None:
    """Measure warm starts and imports in turns, after an uncounted one of each that fills the page cache."""
    started(environment)
    imported(environment)
    found, bare = zip(*((started(environment), imported(environment)) for _ in range(runs)), strict=True)
    for what in found[0]:
        figures = [one[what] for one in found]
        peer = [one.get(what, 0.0) for one in bare]
        report.compare(what, figures, peer if any(peer) else None, unit="s")
    walls = [one["wall until the first answer"] for one in found]
    report.aim("gym-nano's warm start, s", statistics.median(walls), AIM_SECONDS)


def started(environment: dict[str, str]) -> dict[str, float]:
    """Return the times of one start of the command until its first answers."""
    command = [
        str(Path(sys.executable).with_name("gym")),
        "api",
        "--base",
        "gym-nano",
        "--port",
        "0",
        "--json",
    ]
    found: dict[str, float] = {}
    began = time.perf_counter()
    with subprocess.Popen(
        [*command, "--set", "variants=null"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment
    ) as process:
        assert process.stderr is not None
        try:
            address = ""
            while not address:
                line = process.stderr.readline()
                if not line:
                    raise SystemExit(f"gym api ended: {process.wait()}")
                if named := _ADDRESS.search(line):
                    address = named[1].decode()
            while not answers(f"{address}/health"):
                time.sleep(0.05)  # polling costs the server CPU time
            found["wall until health"] = time.perf_counter() - began
            while not answers(f"{address}/ready"):
                time.sleep(0.05)
            found["wall until it is ready"] = time.perf_counter() - began
            post(f"{address}/v1/completions", {"model": "gym-nano", "prompt": "abc", "max_tokens": 1})
            found["wall until the first answer"] = time.perf_counter() - began
            times = psutil.Process(process.pid).cpu_times()
            found["cpu until the first answer"] = times.user + times.system
            said = [{"role": "user", "content": "abc"}]
            post(f"{address}/v1/chat/completions", {"model": "gym-nano", "messages": said, "max_tokens": 1})
            found["wall until a chat after it"] = time.perf_counter() - began
        finally:
            process.send_signal(signal.SIGINT)
            process.stderr.read()
            process.wait(60)
    return found


def answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=10) as answer:
            return bool(answer.status == 200)
    except urllib.error.HTTPError:
        return False


def post(url: str, body: dict[str, Any]) -> None:
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as answer:
        assert json.load(answer)["choices"]


def imported(environment: dict[str, str]) -> dict[str, float]:
    """Return the times of importing PyTorch in a separate process."""
    began = time.perf_counter()
    program = "import torch, time; print(time.process_time())"
    cpu = child([sys.executable, "-c", program], environment)
    wall = time.perf_counter() - began
    return {"wall until the first answer": wall, "cpu until the first answer": cpu}


def memory(report: Report, environment: dict[str, str], runs: int, model: str) -> None:
    peaks: dict[str, list[float]] = {}
    for number in range(runs):
        home = Path(environment["GYM_HOME"]) / f"run-{number}"
        for what in STARTS:
            words = script("_start_side.py", model, what.partition(",")[0])
            found = child(words, {"GYM_HOME": str(home)})
            assert found["stored"] == what.endswith("stored"), found
            peaks.setdefault(what, []).append((found["peak"] - found["libraries"]) / found["weights"])
            report.figure(f"memory_{what}_run_{number}_seconds", found["seconds"])
    for what, figures in peaks.items():
        report.compare(f"peak, {what}", figures, unit="of the weights in bfloat16")
    for what in STARTS:
        report.aim(f"peak, {what}", statistics.median(peaks[what]), AIM_PEAK)


if __name__ == "__main__":
    main()
