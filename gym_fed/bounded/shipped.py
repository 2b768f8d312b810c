"""Chat templates that are no stranger's, because an installed package has the same text: rendered in this process."""

from __future__ import annotations

import importlib.util
from functools import lru_cache
from importlib import resources
from pathlib import Path


def trl_folder() -> Path | None:
    """The folder of TRL's templates, found without importing TRL, which takes seconds; None where it is missing."""
    spec = importlib.util.find_spec("trl")
    return None if spec is None or spec.origin is None else Path(spec.origin).parent / "chat_templates"


def is_shipped(template: str) -> bool:
    """True if an installed package ships this template, or ``declare_own`` named it."""
    return _key(template) in _own or _key(template) in _shipped()


def declare_own(template: str) -> str:
    """Count a template that this project's code has written as its own, and return it."""
    _own.add(_key(template))
    return template


_own: set[str] = set()


@lru_cache(maxsize=1)
def _shipped() -> frozenset[str]:
    nano = resources.files("gym_fed") / "assets" / "gym-nano" / "chat_template.jinja"
    folder = trl_folder()
    files = () if folder is None else sorted(folder.glob("*.jinja"))
    return frozenset(_key(file.read_text("utf-8")) for file in (nano, *files))


def _key(template: str) -> str:
    """Jinja leaves out one line end at the end of a file."""
    return template.removesuffix("\n")
