"""The limit on open files, and so on connections, of this process."""

from __future__ import annotations

import logging

_SPARE_FILES = 256
"""For databases, models and logs, in addition to the connections."""


def raise_file_limit(connections: int, log: logging.Logger) -> int:
    """Raise the process's limit of open files as far as it may be raised.

    Args:
        connections: That are to fit.
        log: Gets a warning when they do not.

    Returns:
        How many connections fit: ``connections``, or fewer where the hard limit is low.
    """
    try:
        import resource
    except ImportError:  # Windows has no such limit
        return connections
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    num_files = connections + _SPARE_FILES
    if hard == resource.RLIM_INFINITY:
        hard = max(soft, num_files)
    if soft < hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    fitting = max(16, hard - _SPARE_FILES)
    if fitting < connections:
        log.warning(
            "this process may open %d files, so %d connections fit and not %d; raise the hard limit "
            "(ulimit -Hn, or LimitNOFILE= in systemd)",
            hard,
            fitting,
            connections,
        )
    return min(fitting, connections)
