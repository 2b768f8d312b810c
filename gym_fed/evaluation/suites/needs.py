"""What a metric needs besides the harness, and would fetch from a network when it is imported: refused before that."""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path

from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.evaluation.suites.listing import MetricNeeds


def missing_needs(needs: MetricNeeds) -> list[str]:
    """What of ``needs`` is not on this machine, in words."""
    found = [f"the package {name}" for name in needs.packages if importlib.util.find_spec(name) is None]
    if needs.nltk is not None and not any((folder / needs.nltk).is_dir() for folder in _nltk_folders()):
        found.append(f"NLTK's {needs.nltk}")
    return found


def require(task: str, needs: MetricNeeds) -> None:
    """Refuse a task whose metric cannot run here.

    Raises:
        GymError: ``MISSING_DEPENDENCY`` with what to install.
    """
    missing = missing_needs(needs)
    if not missing:
        return
    resource = (needs.nltk or "").rpartition("/")[2]
    raise GymError(
        ErrorCode.MISSING_DEPENDENCY,
        f"task {task}: its metric needs {', '.join(missing)}, and would fetch what is missing by itself",
        f"where there is a network: pip install {' '.join(needs.packages)} && python -m nltk.downloader {resource}; "
        "NLTK_DATA names the folder that it is put in",
    )


def _nltk_folders() -> list[Path]:
    """Where NLTK looks, as its documentation lists them."""
    named = [Path(part) for part in os.environ.get("NLTK_DATA", "").split(os.pathsep) if part]
    prefix = Path(sys.prefix)
    inside = [prefix / "nltk_data", prefix / "share" / "nltk_data", prefix / "lib" / "nltk_data"]
    system = [
        Path(root) / "nltk_data" for root in ("/usr/share", "/usr/local/share", "/usr/lib", "/usr/local/lib")
    ]
    return [*named, Path("~/nltk_data").expanduser(), *inside, *system]
