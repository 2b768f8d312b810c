"""Load plug-ins from entry points, and check that the packages and devices that a config needs are there."""

from __future__ import annotations

import importlib.util
import logging
from typing import Any

from gym_fed.core.errors import ErrorCode, GymError, refuse_first
from gym_fed.core.text import plain

log = logging.getLogger("gym_fed")


def load_installed(group: str) -> tuple[Any, ...]:
    """Return the objects of the group's entry points, sorted by name.

    Entry points that cannot be imported are skipped with a warning, because these groups are loaded for every config.
    """
    from importlib.metadata import entry_points  # slow to import, and `--help` loads no plug-in

    loaded = []
    for point in sorted(entry_points(group=group), key=lambda point: point.name):
        try:
            loaded.append(point.load())
        except (Exception, SystemExit) as error:  # noqa: BLE001  # a module of another package may raise anything
            package = f"{point.dist.name} {point.dist.version}" if point.dist else point.value
            log.warning(
                "left out: %s %r of %s cannot be imported: %s; repair or remove that package",
                group,
                point.name,
                plain(package),
                plain(repr(error)),
            )
    return tuple(loaded)


def require_package(module: str, what: str, extra: str = "", *, remedy: str = "") -> None:
    """Refuse ``what`` (a key and value of the config) if ``module`` is not installed.

    Args:
        module: Name of the module.
        what: Beginning of the error message.
        extra: The extra of gym-fed that installs the package.
        remedy: Hint instead of ``extra``, for a package that no extra of gym-fed installs.

    Raises:
        GymError: ``MISSING_DEPENDENCY`` with the command that installs it.
    """
    try:
        is_installed = importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # the parent of a dotted name is missing
        is_installed = False
    if not is_installed:
        raise GymError(
            ErrorCode.MISSING_DEPENDENCY,
            f"{what} needs the package {module}, which is not installed",
            remedy or f"pip install 'gym-fed[{extra}]'",
        )


def require_cuda(what: str) -> None:
    """Refuse ``what`` if there is no CUDA device."""
    import torch

    reason = f"{what} needs a CUDA GPU, and this machine has none"
    remedy = "remove it from the config, or run on a machine with a GPU"
    refuse_first((not torch.cuda.is_available(), reason, remedy))
