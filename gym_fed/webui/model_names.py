"""Models that a request may name: gym-nano, a name on the hub, or a folder below the workbench's."""

from __future__ import annotations

import re

from gym_fed.base.models import NANO
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.webui.workbench import Workbench

_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]{0,95}(/[A-Za-z0-9][\w.-]{0,95})?")


def model_of(workbench: Workbench, name: str) -> str:
    """The model's name, or the path of its folder.

    Raises:
        GymError: ``PERMISSION_DENIED`` for a path that leads out; ``MODEL_NOT_FOUND``.
    """
    if name == NANO:
        return name
    path = workbench.inside(name)
    if path.exists():
        return str(path)
    if not _HUB_NAME.fullmatch(name):
        raise GymError(ErrorCode.MODEL_NOT_FOUND, f"no model {name!r}", "give a folder, or OWNER/NAME")
    return name
