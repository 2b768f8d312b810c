"""Functional correctness of code: its tests pass in a sandbox (Chen et al. 2021, "HumanEval")."""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import secrets
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from pydantic import Field

from gym_fed.config.train.graders import GraderConfig
from gym_fed.core.child_process import start_process
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.evaluation.graders.base import Grader, Sample

_GRACE_SECONDS = 5.0
_VERDICT_BYTES = 4096

# The program's text is sent through a pipe and leaves no file. The token is written when the tests' last line has run,
# so that a program that exits earlier, with any status, has not passed.
_DRIVER = """
import json, os, sys
job = json.loads(sys.stdin.read())
space = {"__name__": "__main__", "__builtins__": __builtins__}
exec(compile(job["code"], "<answer>", "exec"), space)
exec(compile(job["tests"], "<tests>", "exec"), space)
os.write(job["verdict"], job["token"].encode())
os._exit(0)
"""


@dataclass(frozen=True)
class Sandbox:
    """Limits of one program; see ``CodeTestsConfig``."""

    isolation: Literal["namespaces", "process"] = "namespaces"
    timeout_seconds: float = 5.0
    memory_bytes: int = 512 * 2**20
    max_file_bytes: int = 16 * 2**20
    max_processes: int = 16

    def check(self) -> None:
        """Check the sandbox with programs that must pass and programs that must fail.

        Raises:
            GymError: ``CONFIG_INVALID`` if this machine does not permit what ``isolation`` promises.
        """
        if not hasattr(os, "fork"):
            raise GymError(
                ErrorCode.CONFIG_INVALID,
                "code_tests: the sandbox is not available on Windows",
                "run it on Linux (WSL 2 is enough), or use graders that run no programs (docs/graders.md lists them)",
            )
        if not self.passes("import json", "assert json.loads('1') == 1"):
            raise GymError(
                ErrorCode.CONFIG_INVALID,
                f"code_tests: Python does not start on this machine under isolation {self.isolation} and its limits",
                "raise memory_bytes or timeout_seconds",
            )
        if self.isolation == "namespaces" and self.passes("", _REACHES_OUT.format(home=str(Path(__file__)))):
            raise GymError(
                ErrorCode.CONFIG_INVALID,
                "code_tests: a program in the sandbox reached the network or this machine's files",
                "do not grade code on this machine",
            )

    def passes(self, code: str, tests: str) -> bool:
        """Return True if ``tests`` complete after ``code``. Returns within the time limit plus a few seconds.

        Raises:
            GymError: ``CONFIG_INVALID`` if the sandbox itself cannot be set up.
        """
        token, failed = secrets.token_hex(16), secrets.token_hex(16)
        with tempfile.TemporaryDirectory(prefix="gym-sandbox-", ignore_cleanup_errors=True) as folder:
            reader, writer = os.pipe()
            try:
                job = {"code": code, "tests": tests, "verdict": writer, "token": token}
                self._run(folder, writer, failed, json.dumps(job).encode())
                os.set_blocking(reader, False)
                verdict = _read(reader)
            finally:
                os.close(reader)
                os.close(writer)
        if verdict.startswith(failed.encode()):
            reason = verdict[len(failed) :].decode(errors="replace")
            raise GymError(
                ErrorCode.CONFIG_INVALID,
                f"code_tests: isolation {self.isolation} cannot be set up on this machine: {reason}",
                "enable unprivileged user namespaces, or set isolation: process where losing files does not matter",
            )
        return verdict == token.encode()

    def _run(self, folder: str, verdict: int, failed: str, job: bytes) -> None:
        """Start the program and wait until all its processes have ended."""
        python = os.path.realpath(sys.executable)
        home = "/tmp" if self.isolation == "namespaces" else folder
        settings = {
            "isolation": self.isolation,
            "verdict": verdict,
            "failed": failed,
            "folder": folder,
            "python": python,
            "prefixes": [os.path.realpath(sys.base_prefix)],
            "driver": _DRIVER,
            "environment": {"HOME": home, "TMPDIR": home, "LANG": "C.UTF-8", "PATH": "/usr/bin:/bin"},
            "timeout_seconds": self.timeout_seconds,
            "max_file_bytes": self.max_file_bytes,
            "limits": self._limits(),
        }
        process = start_process(
            [python, "-I", "-S", str(Path(__file__).with_name("_sandbox_child.py"))],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            cwd=folder,
            env={},
            pass_fds=[verdict],
            start_new_session=True,
        )
        wall = self.timeout_seconds + (_GRACE_SECONDS if self.isolation == "namespaces" else 0.0)
        try:
            with contextlib.suppress(subprocess.TimeoutExpired, BrokenPipeError):
                process.communicate(json.dumps(settings).encode() + b"\n" + job, timeout=wall)
        finally:
            _end(process)

    def _limits(self) -> dict[str, int]:
        return {
            "RLIMIT_CPU": math.ceil(self.timeout_seconds),
            "RLIMIT_AS": self.memory_bytes,
            "RLIMIT_FSIZE": self.max_file_bytes,
            "RLIMIT_NPROC": self.max_processes,
            "RLIMIT_NOFILE": 64,
            "RLIMIT_CORE": 0,
        }


_REACHES_OUT = """
import os, socket
reached = os.path.exists({home!r}) or os.path.exists("/proc/1") or os.path.exists("/etc/passwd")
try:
    socket.socket(socket.AF_INET, socket.SOCK_DGRAM).connect(("192.0.2.1", 9))
    reached = True
except OSError:
    pass
assert reached
"""


def _end(process: subprocess.Popen[bytes]) -> None:
    """Kill the process group repeatedly, in case a member forks faster than one signal reaches all."""
    for _ in range(20):
        try:
            os.killpg(process.pid, signal.SIGKILL)
        except (ProcessLookupError, PermissionError):
            break
        process.wait()
        time.sleep(0.01)
    process.wait()
    for stream in (process.stdin, process.stdout, process.stderr):
        if stream is not None:
            with contextlib.suppress(BrokenPipeError):
                stream.close()


def _read(descriptor: int) -> bytes:
    with contextlib.suppress(BlockingIOError):
        return os.read(descriptor, _VERDICT_BYTES)
    return b""


_FENCED = re.compile(r"```(?:python|py)?[ \t]*\n(.*?)(?:```|\Z)", re.DOTALL)


class CodeTestsConfig(GraderConfig):
    """1 if the answer's Python code passes the row's tests in a sandbox, else 0."""

    column: str = "tests"
    """The row's column with the tests: Python source, or a list of sources. A HumanEval row's ``entry_point`` is
    called as ``check(entry_point)`` after them."""

    continues_prompt: bool = False
    """True if the answer continues the prompt's code, as in HumanEval; False if it is a complete program."""

    partial: bool = False
    """True to reward the share of tests that pass, each run in its own process; otherwise all must pass."""

    isolation: Literal["namespaces", "process"] = "namespaces"
    """``namespaces`` (Linux) denies access to the network and to all files except Python's. ``process`` only limits
    resources, for machines that forbid namespaces and have no files to protect."""

    timeout_seconds: float = Field(default=5.0, gt=0, le=600)
    """Wall time for each program; CPU time is limited to the same, rounded up."""

    memory_bytes: int = Field(default=512 * 2**20, ge=64 * 2**20)
    """Maximum size of each process's address space in bytes."""

    max_file_bytes: int = Field(default=16 * 2**20, ge=1)
    """Maximum size of a file in bytes; under ``namespaces``, of all files together."""

    max_processes: int = Field(default=16, ge=1)
    """Maximum number of processes and threads of a program. Under ``process``, all processes of the user count, so
    other work on the machine may exhaust the limit, and root is not limited."""

    workers: int = Field(default=2, ge=1, le=256)
    """Number of programs that run at the same time."""


class CodeTests(Grader):
    """1 if all tests of the row complete after the answer's code; with ``partial``, the fraction that do."""

    Settings = CodeTestsConfig
    config: CodeTestsConfig

    def __init__(self, config: CodeTestsConfig) -> None:
        super().__init__(config)
        self._sandbox = Sandbox(
            isolation=config.isolation,
            timeout_seconds=config.timeout_seconds,
            memory_bytes=config.memory_bytes,
            max_file_bytes=config.max_file_bytes,
            max_processes=config.max_processes,
        )

    def setup(self) -> None:
        self._sandbox.check()

    def grade(self, samples: Sequence[Sample]) -> list[float]:
        jobs = [(place, job) for place, sample in enumerate(samples) for job in self._jobs(sample)]
        passed: list[list[bool]] = [[] for _ in samples]
        with ThreadPoolExecutor(self.config.workers) as pool:
            for (place, _), result in zip(
                jobs, pool.map(lambda job: self._sandbox.passes(*job[1]), jobs), strict=True
            ):
                passed[place].append(result)
        return [sum(results) / len(results) for results in passed]

    def _jobs(self, sample: Sample) -> list[tuple[str, str]]:
        """Return code and tests of each process that the sample needs."""
        code = code_in(sample.completion)
        if self.config.continues_prompt:
            code = sample.prompt_text() + code
        tests = sample.column(self.config.column, self.name)
        parts = [str(test) for test in tests] if isinstance(tests, list | tuple) else [str(tests)]
        if not any(part.strip() for part in parts):
            raise GymError(
                ErrorCode.DATA_INVALID, f"grader {self.name}: {self.config.column!r} of a row is empty"
            )
        entry_point = sample.row.get("entry_point")
        call = f"\ncheck({entry_point})\n" if entry_point else ""
        if not self.config.partial:
            parts = ["\n".join(parts)]
        return [(code, part + call) for part in parts]


def code_in(text: str) -> str:
    """Return the last fenced Python block, or the whole text if there is none."""
    blocks = _FENCED.findall(text)
    return str(blocks[-1]) if blocks else text
