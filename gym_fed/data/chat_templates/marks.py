"""Templates that mark the assistant's words by ``{% generation %}``: the model's own, or the one that TRL trains with.

TRL ships the chat templates of many families and, beside most of them, the same with marks (``NAME.jinja`` and
``NAME_training.jinja`` in ``trl/chat_templates``). A model's template that is equal to one of the former is replaced by
the latter while rows are encoded. The files are read without importing TRL, which takes seconds.
"""

from __future__ import annotations

import re
from functools import lru_cache
from pathlib import Path
from typing import Any

from gym_fed.core.bounded.trusted import trl_folder
from gym_fed.core.errors import ErrorCode, GymError

_MARK = re.compile(r"\{%-?\s*generation\s*-?%\}")
_SUFFIX = "_training.jinja"


def has_marks(template: str) -> bool:
    """Whether the template itself marks what the assistant wrote."""
    return _MARK.search(template) is not None


def training_template(template: str) -> str | None:
    """TRL's marked counterpart of a template without marks, or None where TRL knows none."""
    return _counterparts().get(_key(template))


def vision_template(processor: Any) -> str | None:
    """The marked template of a processor that reads images; None where its own has marks.

    Raises:
        GymError: ``DATA_INVALID`` when neither the processor nor TRL has one.
    """
    own = processor.chat_template
    own = own["default"] if isinstance(own, dict) else own
    if has_marks(own):
        return None
    found = training_template(own)
    if found is None:
        raise GymError(
            ErrorCode.DATA_INVALID,
            "the processor's chat template does not mark the assistant's words",
            "set assistant_only_loss: false, or add {% generation %} to the template",
        )
    return found


@lru_cache(maxsize=1)
def _counterparts() -> dict[str, str]:
    found = {}
    for marked in sorted(trl_templates().glob(f"*{_SUFFIX}")):
        original = marked.with_name(marked.name.removesuffix(_SUFFIX) + ".jinja")
        if original.is_file():
            found[_key(original.read_text(encoding="utf-8"))] = marked.read_text(encoding="utf-8")
    return found


def trl_templates() -> Path:
    """The folder of TRL's templates."""
    folder = trl_folder()
    if folder is None:
        raise GymError(
            ErrorCode.MISSING_DEPENDENCY, "the package trl is not installed", "pip install 'trl>=1.16,<1.17'"
        )
    return folder


def _key(template: str) -> str:
    """Jinja leaves out one line end at the end of a file."""
    return template.removesuffix("\n")
