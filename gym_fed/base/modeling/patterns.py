"""Check regular expressions of a config or adapter in another process, before PEFT matches them.

Python's ``re`` takes exponential time for some patterns (``(a+)+b``), and cannot be interrupted in this process.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from gym_fed.core.bounded.patterns import UnusablePatternError, require_quick_match
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.core.text import counted, plain

MAX_CHARS = 2_000
MAX_PATTERNS = 20_000
"""Maximum number of patterns; the largest models need one rank per layer."""
_PLAIN = re.compile(r"[\w.-]*", re.ASCII)
_NAMES = ("target_modules", "exclude_modules")
_PEFT_FORMS = {
    **dict.fromkeys(_NAMES, "{p}"),
    **dict.fromkeys(("rank_pattern", "alpha_pattern", "target_parameters"), r"(.*\.)?({p})$"),
    "modules_to_save": r"(^|.*\.){p}($|\..*)",
    "layers_pattern": r"(?:^|.*?\.){p}\.(?P<idx>\d+)\.",
}


def require_quick_patterns(config: Mapping[str, Any], names: Iterable[str], where: str) -> None:
    """Reject patterns of a PEFT config that take too long on a model's module names.

    Args:
        config: Contents of ``adapter_config.json``.
        names: Names of modules and parameters.
        where: Name of the config in errors.

    Raises:
        GymError: ``CONFIG_INVALID`` with key and pattern.
    """
    given = list(_patterns(config))
    if len(given) > MAX_PATTERNS:
        raise _refused(
            where, given[0][0], f"and similar keys have {len(given)} patterns; {MAX_PATTERNS} are allowed"
        )
    for key, pattern in given:
        if len(pattern) > MAX_CHARS:
            raise _refused(
                where,
                key,
                f"{plain(pattern, 80)!r} has {counted(len(pattern), 'character')}, but at most {MAX_CHARS} are allowed",
            )
    patterns = {
        _PEFT_FORMS[key].format(p=regex): (key, regex) for key, regex in given if not _PLAIN.fullmatch(regex)
    }
    if not patterns:
        return
    try:
        require_quick_match(list(patterns), [*names])
    except UnusablePatternError as error:
        key, pattern = patterns[error.pattern]
        raise _refused(where, key, f"{plain(pattern, 200)!r} {plain(error.problem, 200)}") from error


def names_of(model: Any) -> list[str]:
    """Return the names of a model's modules and parameters, which patterns are matched against."""
    return [name for name, _ in (*model.named_modules(), *model.named_parameters())]


def _patterns(config: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield keys with their patterns; a list of ``target_modules`` contains names instead of patterns."""
    for key in _PEFT_FORMS:
        value = config.get(key) or ()
        if isinstance(value, str):
            yield key, value
        elif key not in _NAMES:
            yield from ((key, pattern) for pattern in value if isinstance(pattern, str))


def _refused(where: str, key: str, what: str) -> GymError:
    return GymError(
        ErrorCode.CONFIG_INVALID,
        f"{where}.{key}: {what}",
        "list the names, or write a pattern without repeats inside repeats",
    )
