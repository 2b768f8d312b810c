"""Processes of our commands that begin with all imports in memory: forks of one that imported them once.

A contributor's process spends some seconds of a core on importing torch, transformers and this project, more than on
most of what a test needs of it. Such a process is a real one, with its own id, memory, files and end. It gets its own
arguments, folder, environment and streams. That the commands start from nothing is shown by the demo, the pages of the
documentation and the check of the package: those begin cold.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import IO, Any

from gym_fed.core import child_process
from tests.support.wait import SECONDS

COMMANDS = {
    "gym": "gym_fed.cli.main",
    "gym-client": "gym_client.cli.main",
    "gym-server": "gym_server.cli.main",
}
"""The modules whose ``main`` the installed commands call."""
LIBRARIES = (
    "transformers.models.qwen3.modeling_qwen3",
    "transformers.models.auto.modeling_auto",
    "transformers.trainer",
    "torch._dynamo",
    "trl.trainer.sft_trainer",
    "flwr.serverapp",
    "flwr.clientapp",
    "grpc.aio",
    "sqlalchemy.dialects.sqlite",
    "pydantic",
    "rich.table",
    "typer",
    "yaml",
)
EXTRAS = ("deepspeed",)
"""Libraries that accelerate imports for every run, where they are installed."""
PROJECT = (
    "gym_server.cli.main",
    "gym_server.cli.run",
    "gym_server.web.dashboard",
    "gym_client.cli.main",
    "gym_client.cli.join",
    "gym_client.app",
    "gym_fed.cli.main",
    "gym_fed.export.gguf.convert",
    "gym_fed.export.readers.reading",
    "gym_fed.training.trainer",
    "gym_fed.serving.setup",
    "gym_fed.serving.http.server",
    "gym_fed.webui.plan_views",
    "gym_fed.webui.row_views",
)
"""Modules of this project. A process with a ``PYTHONPATH`` of its own, whose packages may add to the registries,
imports them itself."""
_IN_THE_ENVIRONMENT = ("gym_fed.core.library_env", "gym_fed.core.failpoints", "gym_client")
"""Modules that read or set the environment when they are imported: a fork runs them again."""
_REPOSITORY = Path(__file__).resolve().parents[2]
_HELLO = b"\n"
_SHARED = "GYM_TESTS_WARM"
"""The address of the library process of all workers."""


class WarmProcess:
    """What the tests need of ``subprocess.Popen``, for a command of ``COMMANDS``."""

    def __init__(
        self,
        arguments: Sequence[str | Path],
        *,
        stdin: int | IO[Any] = subprocess.DEVNULL,
        stdout: int | IO[Any] = subprocess.DEVNULL,
        stderr: int | IO[Any] = subprocess.DEVNULL,
        cwd: Path | None = None,
        env: Mapping[str, str] | None = None,
        python: Path | None = None,
    ) -> None:
        """Start the process; ``python`` is what it takes for the interpreter, such as ``python_shim(folder)``."""
        self.args = arguments
        self.returncode: int | None = None
        self.stdout: IO[str] | None = None
        self.stderr: IO[str] | None = None
        self._received = b""
        words = [Path(arguments[0]).name, *map(str, arguments[1:])]
        order = {"argv": words, "cwd": str(cwd or Path.cwd()), "env": dict(env or os.environ)}
        order["python"] = str(python or sys.executable)
        with contextlib.ExitStack() as stack:
            null = stack.enter_context(open(os.devnull, "r+b")).fileno()
            out, error = (null if stream == subprocess.DEVNULL else stream for stream in (stdout, stderr))
            if stdout == subprocess.PIPE:
                self.stdout, out = _pipe(stack)
            if stderr == subprocess.PIPE:
                self.stderr, error = _pipe(stack)
            given = (null if stdin == subprocess.DEVNULL else stdin, out, error)
            streams = [f if isinstance(f, int) else f.fileno() for f in given]
            has_own_path = order["env"].get("PYTHONPATH") != os.environ.get("PYTHONPATH")
            self._keeper = socket.socket(socket.AF_UNIX)
            self._keeper.connect(_library_process(with_project=not has_own_path))
            socket.send_fds(self._keeper, [_HELLO], streams)
            self._keeper.sendall(json.dumps(order).encode() + _HELLO)
        while not self._received.endswith(_HELLO):
            self._received += self._keeper.recv(1) or _gone()
        self.pid = int(self._received)
        self._received = b""

    def poll(self) -> int | None:
        """The exit status, negative for a signal; None while it runs."""
        return self._wait(0)

    def wait(self, timeout: float | None = None) -> int:
        status = self._wait(timeout)
        if status is None:
            raise subprocess.TimeoutExpired(list(map(str, self.args)), timeout or 0)
        return status

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def _wait(self, timeout: float | None) -> int | None:
        end = None if timeout is None else time.monotonic() + timeout
        while self.returncode is None:
            left = None if end is None else max(0.0, end - time.monotonic())
            if not select.select([self._keeper], [], [], left)[0]:
                return None
            self._received += self._keeper.recv(64) or _gone()
            if self._received.endswith(_HELLO):
                self.returncode = int(self._received)
                self._keeper.close()
        return self.returncode


def _pipe(stack: contextlib.ExitStack) -> tuple[IO[str], int]:
    """A pipe's end to read from, and the other, which ``stack`` closes."""
    reading, writing = os.pipe()
    stack.callback(os.close, writing)
    return os.fdopen(reading, encoding="utf-8"), writing


def run(
    arguments: Sequence[str | Path],
    *,
    stdin: str = "",
    timeout: float = 2 * SECONDS,
    cwd: Path | None = None,
    env: Mapping[str, str] | None = None,
    python: Path | None = None,
) -> subprocess.CompletedProcess[str]:
    """Like ``subprocess.run`` with texts for its streams."""
    with (
        tempfile.TemporaryFile() as given,
        tempfile.TemporaryFile() as out,
        tempfile.TemporaryFile() as error,
    ):
        given.write(stdin.encode())
        given.seek(0)
        process = WarmProcess(
            arguments, stdin=given, stdout=out, stderr=error, cwd=cwd, env=env, python=python
        )
        try:
            status = process.wait(timeout)
        finally:
            process.kill()
        texts = []
        for file in (out, error):
            file.seek(0)
            texts.append(file.read().decode(errors="replace"))
    return subprocess.CompletedProcess(list(map(str, arguments)), status, *texts)


def shims(folder: Path) -> Path:
    """Write an executable of each command's name, for the PATH of a shell, into ``folder``; return it."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in COMMANDS:
        file = folder / name
        file.write_text(_SHIM.format(python=sys.executable, address=_library_process()))
        file.chmod(0o755)
    return folder


def python_shim(folder: Path) -> Path:
    """Write an executable into ``folder`` that runs modules of this project in such forks; return it.

    The process that starts one sees the shim, which ends with the fork, and with which the fork ends.
    """
    python = folder / "python"
    folder.mkdir(parents=True, exist_ok=True)
    kept = {"python": sys.executable, "path": os.environ.get("PYTHONPATH")}
    text = _SHIM.format(python=sys.executable, address=_library_process())
    python.write_text(text.replace("keeper =", _OTHERWISE.format(**kept) + "keeper =", 1))
    python.chmod(0o755)
    return python


@contextlib.contextmanager
def warm_children(folder: Path) -> Iterator[None]:
    """Let the child processes that this project starts in the block be such forks, by a shim in ``folder``."""
    started_by, child_process.sys = child_process.sys, _Sys(python_shim(folder))  # type: ignore[assignment]
    try:
        yield
    finally:
        child_process.sys = started_by


class _Sys:
    """The module ``sys`` with another interpreter for children."""

    def __init__(self, executable: Path) -> None:
        self.executable = str(executable)

    def __getattr__(self, name: str) -> Any:
        return getattr(sys, name)


_OTHERWISE = """
small = sys.argv[3:4] and sys.argv[3].startswith("gym_fed.core.")  # it limits its own memory
if sys.argv[1:3] != ["-P", "-m"] or small or os.environ.get("PYTHONPATH") != {path!r}:
    os.execv({python!r}, [{python!r}, *sys.argv[1:]])
"""
_SHIM = """#!{python} -ISs
import json, os, signal, socket, sys
keeper = socket.socket(socket.AF_UNIX)
keeper.connect({address!r})
leads = os.getpgrp() == os.getpid()
order = {{"argv": [os.path.basename(sys.argv[0]), *sys.argv[1:]], "cwd": os.getcwd(), "env": dict(os.environ)}}
order["leads"] = leads
socket.send_fds(keeper, [b"\\n"], [0, 1, 2])
keeper.sendall(json.dumps(order).encode() + b"\\n")
replies = keeper.makefile()
pid = int(replies.readline())
for number in (signal.SIGINT, signal.SIGTERM):
    signal.signal(number, lambda number, frame: (os.killpg if leads else os.kill)(pid, number))
status = int(replies.readline())
if status < 0:
    signal.signal(-status, signal.SIG_DFL)
    os.kill(os.getpid(), -status)
sys.exit(status)
"""


class _LibraryProcess:
    """A process that imports the libraries, and the project or not, for this process and as long as it."""

    def __init__(self, with_project: bool) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="gym-warm-")
        self.address = str(Path(self._folder.name) / "socket")
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.support.warm", self.address, *(PROJECT if with_project else ())],
            cwd=_REPOSITORY,
            env={
                **os.environ,
                "OMP_NUM_THREADS": "1",
                "JE_ARROW_MALLOC_CONF": "background_thread:false",
            },  # one thread is all that forks
            stdin=subprocess.PIPE,  # closes when this process is gone, whatever ended it
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        atexit.register(self.close)

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        self._folder.cleanup()


_started: dict[tuple[int, bool], _LibraryProcess] = {}


def start_for_workers() -> None:
    """Start the library process that all workers of a run use; it imports while they collect their tests."""
    os.environ[_SHARED] = _begun(with_project=True)


def _library_process(with_project: bool = True) -> str:
    """The address of a library process that answers."""
    address = (os.environ.get(_SHARED) if with_project else None) or _begun(with_project)
    end = time.monotonic() + SECONDS
    while not Path(address).exists():
        if time.monotonic() > end:
            raise RuntimeError(f"no library process: python -m tests.support.warm {address} {PROJECT[0]}")
        time.sleep(0.05)
    return address


def _begun(with_project: bool) -> str:
    key = os.getpid(), with_project
    if key not in _started:
        _started[key] = _LibraryProcess(with_project)
    return _started[key].address


def _gone() -> bytes:
    raise RuntimeError("the process of the libraries is gone")


# ---- in the process of the libraries ----


def _serve(address: str, *project: str) -> dict[str, Any]:
    """Fork for every order; returns in a fork, with what it was asked for."""
    for name in (*LIBRARIES, *filter(find_spec, EXTRAS), *project):
        importlib.import_module(name)
    child_process._LOW_PRIORITY = 0  # as in conftest.py
    gc.freeze()  # a fork's collections leave the pages of the libraries alone
    assert len(os.listdir("/proc/self/task")) == 1, "a fork would lose the other threads"
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(f"{address}.new")
    listener.listen(64)
    Path(f"{address}.new").rename(address)  # whoever sees it can connect
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # keepers are nobody's to wait for
    while True:
        ready = select.select([listener, sys.stdin], [], [])[0]
        if listener not in ready:
            os._exit(0)
        connection = listener.accept()[0]
        if os.fork() == 0:
            listener.close()
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            return _keep(connection)
        connection.close()


def _keep(connection: socket.socket) -> dict[str, Any]:
    """Fork the process, wait, and report its exit status; it ends when its client does."""
    _, streams, _, _ = socket.recv_fds(connection, 1, 3)
    text = b""
    while not text.endswith(_HELLO):
        text += connection.recv(65536) or os._exit(0)
    order: dict[str, Any] = json.loads(text)
    child = os.fork()
    if child == 0:
        connection.close()
        for number, stream in enumerate(streams):
            os.dup2(stream, number)
            os.close(stream)
        return order
    if order.get("leads"):  # a signal to the group of its caller reaches what it starts, too
        os.setpgid(child, child)
    for stream in streams:
        os.close(stream)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    connection.sendall(b"%d\n" % child)
    ended = os.pidfd_open(child)
    waited: list[Any] = [ended, connection]
    if ended not in select.select(waited, [], [])[0]:
        os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    with contextlib.suppress(OSError):
        connection.sendall(b"%d\n" % os.waitstatus_to_exitcode(status))
    os._exit(0)


def _become(order: dict[str, Any]) -> None:
    """Go on as the command would from here."""
    import numpy as np
    import torch

    os.chdir(order["cwd"])
    os.environ.clear()
    os.environ.update(order["env"])
    paths = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
    sys.path[:0] = [path for path in paths if path not in sys.path]
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", os.cpu_count() or 1)))
    np.random.seed()  # or all forks would draw the same
    sys.argv = order["argv"]
    sys.executable = order.get("python", sys.executable)
    main = sys.modules["__main__"]
    main.__package__, main.__spec__ = None, None  # else the usage would call itself python -m tests.support
    sys.stdin = open(0, closefd=False)  # noqa: SIM115 (the process owns its streams)
    sys.stdout = open(1, "w", buffering=1 if os.isatty(1) else -1, closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", buffering=1, closefd=False, errors="backslashreplace")  # noqa: SIM115
    status: Any = 1
    _meet_the_environment()
    try:
        if sys.argv[0] == "python":  # -P -m MODULE
            module, sys.argv = sys.argv[3], sys.argv[3:]
            warnings.filterwarnings("ignore", ".* found in sys.modules", RuntimeWarning)
            runpy.run_module(module, run_name="__main__", alter_sys=True)
        else:
            importlib.import_module(COMMANDS[sys.argv[0]]).main()
        status = 0
    except SystemExit as end:
        status = end.code or 0
        if isinstance(status, str):
            print(status, file=sys.stderr)
            status = 1
    except BaseException:  # noqa: BLE001 (printed as an interpreter prints it)
        sys.excepthook(*sys.exc_info())
    # As an interpreter ends, but for its objects: to take all of the libraries' apart copies every page of theirs.
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    os._exit(status)


def _meet_the_environment() -> None:
    """Let what the project has imported see this process's variables and streams."""
    for name in _IN_THE_ENVIRONMENT:
        if name in sys.modules:
            importlib.reload(sys.modules[name])
    if console := sys.modules.get("gym_fed.core.console"):
        for one in (console.out, console.err):
            one.__init__(stderr=one.stderr)


if __name__ == "__main__":
    _become(_serve(*sys.argv[1:]))
