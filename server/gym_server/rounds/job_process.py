"""Run a job that needs the model in a separate low-priority process, so that it does not slow rounds."""

from __future__ import annotations

import subprocess
import tempfile
from collections import deque
from contextlib import suppress

from pydantic import BaseModel

from gym_fed.core.child_process import background_environment, module_command, put_last, start_process
from gym_fed.web.model_server import KEPT_LINES, LINE_LENGTH


class JobFailed(Exception):
    """Raised if the process ends without a result.

    Attributes:
        output: The last lines of its standard error.
    """

    def __init__(self, output: list[str]) -> None:
        super().__init__("the process ended without a result")
        self.output = output


class JobProcess:
    """A child process that reads one line of JSON on standard input and exits when its parent exits.

    Args:
        module: The module to run, as for `python -m`.
    """

    def __init__(self, module: str) -> None:
        self._module = module
        self._process: subprocess.Popen[str] | None = None
        self._is_ended = False

    def run(self, job: BaseModel) -> tuple[str, list[str]]:
        """Run the job and wait until it ends.

        Returns:
            Its standard output, and the last lines of its standard error.

        Raises:
            JobFailed: If the process exits with a status other than 0, or is stopped.
        """
        errors: deque[str] = deque(maxlen=KEPT_LINES)
        with (
            tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as output,
            start_process(
                module_command(self._module),
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=subprocess.PIPE,
                env=background_environment(),
                start_new_session=True,
                text=True,
                errors="replace",
            ) as process,
        ):
            self._process = process
            put_last(process.pid)
            if self._is_ended:
                process.kill()
            assert process.stdin is not None
            assert process.stderr is not None
            with suppress(BrokenPipeError):
                process.stdin.write(job.model_dump_json() + "\n")
                process.stdin.flush()
            errors.extend(line.rstrip("\n")[:LINE_LENGTH] for line in process.stderr)
            with suppress(OSError):
                process.stdin.close()
            if process.wait() != 0:
                raise JobFailed(list(errors))
            output.seek(0)
            return output.read(), list(errors)

    def stop(self) -> None:
        """Kill the process, or, if it has not started yet, as soon as it starts."""
        self._is_ended = True
        if (process := self._process) is not None:
            process.kill()
