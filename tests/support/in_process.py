"""Our commands in this process, for tests in which a process is not the subject."""

from __future__ import annotations

import gc
import importlib
import io
import os
import signal
import subprocess
import sys
import warnings
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, redirect_stderr, redirect_stdout
from pathlib import Path

from tests.support.warm import COMMANDS

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


def run_here(
    arguments: Sequence[str | Path],
    *,
    stdin: str = "",
    cwd: Path | None = None,
    env: Mapping[str, str] | None = None,
) -> subprocess.CompletedProcess[str]:
    """Like ``tests.support.warm.run``, but in this process, which has imported the project."""
    words = [Path(arguments[0]).name, *map(str, arguments[1:])]
    out, error = io.StringIO(), io.StringIO()
    with ExitStack() as stack:
        _restore_afterwards(stack)
        if cwd is not None:
            os.chdir(cwd)
        if env is not None:
            os.environ.clear()
            os.environ.update(env)
        sys.argv, sys.stdin = words, io.StringIO(stdin)
        stack.enter_context(redirect_stdout(out))
        stack.enter_context(redirect_stderr(error))
        status: object = 0
        try:
            importlib.import_module(COMMANDS[words[0]]).main()
        except SystemExit as end:
            status = end.code or 0
    return subprocess.CompletedProcess(words, int(str(status)), out.getvalue(), error.getvalue())


def _restore_afterwards(stack: ExitStack) -> None:
    """Restore what a command changes in its process when ``stack`` closes."""
    environment = dict(os.environ)
    stack.callback(os.environ.update, environment)
    stack.callback(os.environ.clear)  # callbacks run in reverse order
    stack.callback(os.chdir, Path.cwd())
    for name in ("argv", "stdin", "path"):
        stack.callback(setattr, sys, name, getattr(sys, name))
    sys.path = [*sys.path]
    stack.callback(setattr, warnings, "showwarning", warnings.showwarning)
    stack.callback(gc.set_threshold, *gc.get_threshold())
    for number in _SIGNALS:
        stack.callback(signal.signal, number, signal.getsignal(number))
