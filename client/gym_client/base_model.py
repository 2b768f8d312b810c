"""Which base model is loaded, and whose word that is.

A path is the contributor's own to give. A hub names a base by a plain name; nothing that it says leads into a folder of
this machine but the local cache of downloaded models, and that only after the contributor has agreed to look there.
"""

from __future__ import annotations

import os
import re

from gym_fed.errors import ErrorCode, GymError

NANO = "gym-nano"
_PLAIN = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,95}", re.ASCII)
_REMEDY = "if you know the federation's base, give its folder with --model PATH"


def base_source(given: str | None, named: str) -> str:
    """Where the base is loaded from: what the contributor gave, else the hub's plain name for it.

    Args:
        given: ``--model``, now or the last time.
        named: What the hub calls its base, in its status or in a task.

    Raises:
        GymError: ``POLICY_REFUSED`` for a hub's name that is a path, or that is a file or folder here. Nothing is
            opened to find that out.
    """
    if given is not None:
        return given
    if named == NANO:
        return named
    if not _PLAIN.fullmatch(named) or ".." in named:
        raise GymError(
            ErrorCode.POLICY_REFUSED,
            f"the hub names its base model {named[:200]!r}, which is no plain name",
            f"a hub may not choose a path on this machine; {_REMEDY}",
        )
    if os.path.lexists(named):
        raise GymError(
            ErrorCode.POLICY_REFUSED,
            f"the hub names its base model {named!r}, and there is a file or folder of that name here",
            f"a hub may not choose a folder on this machine; {_REMEDY}",
        )
    return named


def needs_a_look(given: str | None, named: str) -> bool:
    """Whether the base is one that only the hub named: the contributor is asked before a local copy is read."""
    return given is None and named != NANO
