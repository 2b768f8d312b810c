"""One side of a comparison, ours or another program's: how to run it, and the results of its runs."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

ENVIRONMENT = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}


class Peer:
    """One side of a comparison.

    Args:
        name: Name in tables.
        run: A function that returns a run's result, or a command (``script``) to which the run's arguments are appended
            as JSON and whose last line of output is the result.
        environment: Environment variables of the command, in addition to ``ENVIRONMENT``.
    """

    def __init__(
        self, name: str, run: Callable[..., Any] | Sequence[str], environment: Mapping[str, str] | None = None
    ) -> None:
        self.name = name
        self.results: list[Any] = []
        self._run, self._environment = run, environment

    def measure(self, *arguments: Any) -> Any:
        if callable(self._run):
            result = self._run(*arguments)
        else:
            result = child([*self._run, *map(json.dumps, arguments)], self._environment, self.name)
        self.results.append(result)
        return result

    def values(self, key: str) -> list[float]:
        return [float(result[key]) for result in self.results]

    def median(self, key: str) -> float:
        return statistics.median(self.values(key))


class WaitingPeer(Peer):
    """A side whose process prints ``ready`` and then answers every input line with a line of JSON.

    Args:
        settings: Settings, which are written to a file whose path is the command's last argument.
        folder: Folder of this file and of the log.
    """

    def __init__(self, name: str, command: Sequence[str], settings: Any, folder: Path) -> None:
        super().__init__(name, self._turn)
        folder.mkdir(parents=True, exist_ok=True)
        file, self._log = folder / "settings.json", folder / "side.log"
        file.write_text(json.dumps(settings))
        pipe = subprocess.PIPE
        with open(self._log, "wb") as log:
            self._process = subprocess.Popen(
                [*command, str(file)], stdin=pipe, stdout=pipe, stderr=log, text=True
            )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._input: IO[str] = self._process.stdin
        self._output: IO[str] = self._process.stdout
        self._line()

    def close(self) -> None:
        self._process.kill()
        self._process.wait()

    def _turn(self) -> Any:
        self._input.write("\n")
        self._input.flush()
        return json.loads(self._line())

    def _line(self) -> str:
        line = self._output.readline().strip()
        if not line:
            raise SystemExit(f"{self.name} ended: {self._log.read_text()[-2000:]}")
        return line


def answer_turns(start: Callable[[dict[str, Any]], Callable[[int], Any]]) -> None:
    """Run the process of a ``WaitingPeer``: a warm-up turn of two tokens, then a turn of ``settings["new"]`` tokens per
    line.

    Args:
        start: Function that starts the side from the settings and returns the function that runs a turn.
    """
    settings = json.loads(Path(sys.argv[1]).read_text())
    turn = start(settings)
    turn(2)
    print("ready", flush=True)
    for _ in sys.stdin:
        print(json.dumps(turn(settings["new"])), flush=True)


def in_turns(
    peers: Iterable[Peer], turns: int, *arguments: Any, run: Callable[..., Any] = Peer.measure
) -> None:
    """Run every side once per turn, in alternating order, so that slow periods of the machine affect all sides."""
    peers = list(peers)
    for turn in range(turns):
        for peer in peers if turn % 2 == 0 else reversed(peers):
            run(peer, *arguments)


def script(file: str, *words: str) -> list[str]:
    """Return the command that runs a file of this folder."""
    return [sys.executable, str(Path(__file__).with_name(file)), *words]


def child(command: Sequence[str], environment: Mapping[str, str] | None = None, name: str = "") -> Any:
    """Return the JSON in a command's last line of output; raises with its error output if it fails."""
    variables = {**os.environ, **ENVIRONMENT, **(environment or {})}
    done = subprocess.run(command, env=variables, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{name or command[1]}: {done.stderr[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def spread(values: Sequence[float], scale: float = 1.0) -> str:
    low, middle, high = (scale * pick(values) for pick in (min, statistics.median, max))
    return f"{middle:.3g} ({low:.3g}-{high:.3g})"


def clocked(
    sides: Mapping[str, Callable[[], Any]],
    turns: int,
    clock: Callable[[], float] = time.process_time,
    warmed: Callable[[str], None] = lambda _: None,
) -> dict[str, list[float]]:
    """Return the seconds of every function in every turn, after a warm-up run of each and a call of ``warmed``."""
    seen: dict[str, list[float]] = {name: [] for name in sides}
    for name, run in sides.items():
        run()
        warmed(name)
    for _ in range(turns):
        for name, run in sides.items():
            started = clock()
            run()
            seen[name].append(clock() - started)
    return seen
