"""A crowd of contributors in one asyncio process, for ``crowd.py``, ``kills.py`` and ``soak.py``.

Each member uses `hub.proto` over its own TLS connection: it enrols, holds a work stream, downloads soups, renews its
lease, uploads, submits, and reads its account. Nothing is trained: updates are prepared in advance and signed for each
task.
"""

import os

# Set before gRPC is imported, since its fork handlers may kill a child process before it runs its program.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")

import sys
from pathlib import Path

# The crowd uses the test suite's contributor to build its messages.
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
