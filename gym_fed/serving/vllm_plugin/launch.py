"""Launch a vLLM server for the gateway: run vLLM's own command until the gateway ends.

Usage: ``python -m gym_fed.serving.vllm_plugin.launch serve MODEL ...`` in vLLM's environment, as the leader of a
process group, with a pipe from the gateway as standard input.
"""

from __future__ import annotations

import importlib
import os
import signal
import sys
import threading


def main() -> None:
    """Run vLLM's command line, and kill the whole process group when standard input is closed."""
    threading.Thread(target=_end_at_eof, name="until-eof", daemon=True).start()
    importlib.import_module("vllm.entrypoints.cli.main").main()


def _end_at_eof() -> None:
    while os.read(sys.stdin.fileno(), 1 << 12):
        pass
    # vLLM's engine and workers are separate processes, which would outlive their parent.
    os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    main()
