"""Entry point of the commands, which exits without a traceback on Ctrl-C during imports."""

from __future__ import annotations

import importlib
import sys
from typing import NoReturn

from gym_fed.core.child_process import shut_out_working_folder
from gym_fed.core.errors import ErrorCode


def run(module: str) -> NoReturn:
    """Import ``module`` and call its ``main``, which exits the process."""
    shut_out_working_folder()  # before anything else is imported
    try:
        importlib.import_module(module).main()
    except KeyboardInterrupt:
        sys.exit(ErrorCode.INTERRUPTED.exit_code)
    raise AssertionError(f"main of {module} has returned")
