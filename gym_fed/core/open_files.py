"""Raise the limit of open files, which also limits connections."""

from __future__ import annotations

import logging

_SPARE_FILES = 256
"""For databases, models and logs, in addition to the connections."""


def raise_file_limit(connections: int, log: logging.Logger) -> int:
    """Raise the limit of open files as far as the hard limit allows.

    Args:
        connections: Number of connections needed.
        log: Logger for a warning if the limit is too low.

    Returns:
        The possible number of connections: ``connections``, or fewer if the hard limit is too low.
    """
    try:
        import resource
    except ImportError:  # not available on Windows
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
