"""Registry of trusted chat templates, which are rendered without a child process."""

from __future__ import annotations

import importlib.util
from functools import lru_cache
from importlib import resources
from pathlib import Path


def trl_folder() -> Path | None:
    """Return the folder of TRL's templates without importing TRL, which takes seconds; None if TRL is missing."""
    spec = importlib.util.find_spec("trl")
    return None if spec is None or spec.origin is None else Path(spec.origin).parent / "chat_templates"


def is_trusted(template: str) -> bool:
    """Return True if an installed package ships this template, or ``trust_template`` was called with it."""
    return _key(template) in _trusted or _key(template) in _shipped()


def trust_template(template: str) -> str:
    """Trust a template that gym-fed's own code has built, and return it."""
    _trusted.add(_key(template))
    return template


_trusted: set[str] = set()


@lru_cache(maxsize=1)
def _shipped() -> frozenset[str]:
    nano = resources.files("gym_fed") / "assets" / "gym-nano" / "chat_template.jinja"
    folder = trl_folder()
    files = () if folder is None else sorted(folder.glob("*.jinja"))
    return frozenset(_key(file.read_text("utf-8")) for file in (nano, *files))


def _key(template: str) -> str:
    """Return the text to compare; Jinja drops one newline at the end of a file."""
    return template.removesuffix("\n")
