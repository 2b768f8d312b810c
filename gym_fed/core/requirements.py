"""Check that this machine and installation have what a config needs, before anything is loaded."""

from __future__ import annotations

import importlib.util

from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.core.refusals import refuse_first


def require_package(module: str, what: str, extra: str = "", *, remedy: str = "") -> None:
    """Refuse ``what`` (a key and value of the config) if ``module`` is not installed.

    Args:
        module: Name of the module.
        what: Begins the message.
        extra: The extra of gym-fed that installs it.
        remedy: Instead of ``extra``, for a package in no extra of gym-fed.

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
    """Refuse ``what`` without a CUDA device."""
    import torch

    reason = f"{what} needs a CUDA GPU, and this machine has none"
    remedy = "remove it from the config, or run on a machine with a GPU"
    refuse_first((not torch.cuda.is_available(), reason, remedy))
