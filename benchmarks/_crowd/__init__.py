"""A crowd of contributors in one asyncio process, for ``crowd.py``, ``kills.py`` and ``soak.py``.

Members speak `hub.proto` over TLS connections of their own: they enrol, hold a work stream, download soups, keep their
lease, upload, submit, and read their account. Nothing is trained: updates are made before, and signed again.
"""

import os

# Before gRPC is imported: its fork handlers may end a child of this process before the child runs its program.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")

import sys
from pathlib import Path

# The crowd sends the records of the tests' contributor.
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
