"""Graders as a command names them: ``numeric``, or ``regex:{pattern: "[0-9]+"}`` with settings."""

from __future__ import annotations

from collections.abc import Sequence

from gym_fed.config.train.graders import GraderConfig, GraderSections
from gym_fed.config.yaml.file import validate
from gym_fed.config.yaml.strict import parse_value
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.core.text import plain

_PLACE = "--grader:1:1: graders.0"
_SHOWN = 60


def graders_named(texts: Sequence[str]) -> list[GraderConfig]:
    """Parse values of ``--grader``.

    Args:
        texts: Each a grader's name, or ``NAME:{key: value}`` with the keys of a config's ``graders`` entry.

    Raises:
        GymError: ``CONFIG_INVALID`` for an unknown grader or wrong settings; ``USAGE`` for text that is neither form,
            and for two graders of one name.
    """
    found = [_parsed(text) for text in texts]
    names = [entry.name or entry.grader for entry in found]
    if twice := [name for name in names if names.count(name) > 1]:
        raise GymError(
            ErrorCode.USAGE,
            f"--grader: two graders are called {twice[0]!r}",
            f"give one of them a name, such as --grader '{twice[0]}:{{name: second}}'",
        )
    return found


def _parsed(text: str) -> GraderConfig:
    name, colon, raw = text.partition(":")
    form = f"write --grader NAME, or --grader 'NAME:{{key: value}}' (got {plain(text, _SHOWN)})"
    try:
        settings = parse_value(raw) if colon else {}
    except ValueError as error:
        raise GymError(ErrorCode.USAGE, f"--grader {plain(name, _SHOWN)}: {error}", form) from error
    if not isinstance(settings, dict) or not name.strip():
        raise GymError(ErrorCode.USAGE, f"--grader {plain(text, _SHOWN)}: settings are not a mapping", form)
    values = {"graders": [{**settings, "grader": name.strip()}]}
    try:
        return validate(values, GraderSections, "--grader", read_others=False).graders[0]
    except GymError as error:
        place = f"--grader {plain(name, _SHOWN)}"
        message = error.message.replace(f"{_PLACE}.grader", place).replace(_PLACE, place)
        raise GymError(error.code, message, error.hint) from error
