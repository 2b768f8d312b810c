"""Render a task's templates for a row in a Jinja sandbox, and check its regular expressions.

The harness's rules apply: a value is a column's name, else a Jinja template; a number is an index into the choices; a
template of choices or of several targets renders a list in Python's notation.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from re import _constants as sre  # type: ignore[attr-defined]
from re import _parser as parser  # type: ignore[attr-defined]
from typing import Any

from gym_fed.core.bounded.errors import LimitExceededError
from gym_fed.core.bounded.pool import EvaluationError, evaluate
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.core.text import counted, plain

MAX_CHARACTERS = 1000
"""Maximum number of characters of an expression."""
MAX_OPEN = 3
"""Maximum number of unbounded repeats; each multiplies the time of a search by the length of the text."""
_MAX_WAYS = 10_000
_MAX_TIMES = 1000
_REPEATS = {sre.MAX_REPEAT, sre.MIN_REPEAT, sre.POSSESSIVE_REPEAT}


def require_quick(text: str) -> None:
    """Refuse a regular expression whose search may take exponential time.

    A backtracking search tries every way to match. If a part that matches in several ways is repeated without a limit,
    as in ``(a+)+``, the number of ways doubles with every character.

    Raises:
        ValueError: Why.
    """
    if len(text) > MAX_CHARACTERS:
        raise ValueError(
            f"the expression has {counted(len(text), 'character')}; at most {MAX_CHARACTERS} are allowed"
        )
    try:
        ways, num_open = _counted(parser.parse(text))
    except (re.error, OverflowError, RecursionError) as error:
        raise ValueError(f"not a regular expression: {error}") from error
    if ways > _MAX_WAYS or num_open > MAX_OPEN:
        raise ValueError(
            f"there are too many ways to match it; use at most {MAX_OPEN} unbounded repeats, and fewer bounded ones"
        )


def _counted(tree: Iterable[tuple[Any, Any]]) -> tuple[int, int]:
    """Return the number of ways to match at one position, an unbounded repeat counting as one, and the number of
    unbounded repeats."""
    ways, num_open = 1, 0
    for kind, value in tree:
        more, also_open = _num_ways(kind, value)
        ways, num_open = min(ways * more, _MAX_WAYS + 1), num_open + also_open
    return ways, num_open


def _num_ways(kind: Any, value: Any) -> tuple[int, int]:
    if kind in _REPEATS:
        return _repeated(*value)
    if kind is sre.BRANCH:
        return _branches(value[1])
    if kind is sre.SUBPATTERN:
        return _counted(value[3])
    if kind in (sre.ASSERT, sre.ASSERT_NOT):
        return _counted(value[1])
    if kind is sre.ATOMIC_GROUP:
        return _counted(value)
    if kind is sre.GROUPREF_EXISTS:
        return _branches([branch for branch in value[1:] if branch is not None])
    return 1, 0


def _repeated(least: int, most: Any, inner: Any) -> tuple[int, int]:
    ways, num_open = _counted(inner)
    least, most = int(least), int(most)
    is_open = most > _MAX_TIMES
    if (most > 1 and num_open) or (is_open and (ways > 1 or inner.getwidth()[0] == 0)):
        raise ValueError(
            "a repeat within a repeat, which may take exponential time: use a single one, as in [a-z ]+"
        )
    if is_open:
        return 1, 1
    total = 0
    for times in range(least, most + 1):
        total = min(total + ways ** min(times, 64), _MAX_WAYS + 1)
    return total, num_open


def _branches(branches: Iterable[Any]) -> tuple[int, int]:
    """Return the number of branches that can match; branches with different first characters are mutually exclusive."""
    total: dict[Any, int] = {}
    num_open = 0
    for branch in branches:
        ways, more = _counted(branch)
        first = branch[0][1] if len(branch) and branch[0][0] is sre.LITERAL else None
        total[first] = total.get(first, 0) + ways
        num_open += more
    anything = total.pop(None, 0)
    return min(anything + max(total.values(), default=0), _MAX_WAYS + 1), num_open


Row = Mapping[str, Any]
TEMPLATES = ("doc_to_text", "doc_to_target", "doc_to_choice")
"""The keys of a task with templates."""
_MAX_DIGITS = 18
"""Maximum number of digits of a choice's index; a longer number is text."""


@dataclass(frozen=True)
class Rendered:
    """A rendered row.

    Attributes:
        prompt: The prompt without examples; if a task scores one ending after several beginnings, the first beginning.
        target: The correct answer as text.
        choices: The choices to score; none for generation.
        gold: Indices of the right answers in ``choices``.
    """

    prompt: str
    target: str
    choices: tuple[str, ...]
    gold: tuple[int, ...]


class TemplateProblem(ValueError):
    """An error in one key of a task's definition, for some row."""

    def __init__(self, key: str, problem: str) -> None:
        super().__init__(f"{key}: {problem}")
        self.key, self.problem = key, problem


def render(config: Mapping[str, Any], row: Row) -> Rendered:
    """Render one row.

    Args:
        config: Definition with ``doc_to_text``, ``doc_to_target``, ``doc_to_choice`` and ``output_type``; functions are
            loaded.

    Raises:
        TemplateProblem: For a failing template, invalid choices, or a gold answer that is not among them.
    """
    choices = choices_of(config.get("doc_to_choice"), row)
    prompt = value_of("doc_to_text", config.get("doc_to_text"), row, choices is not None)
    target = value_of("doc_to_target", config.get("doc_to_target"), row, choices is not None)
    if choices is None:
        return Rendered(str(prompt), str(target), (), ())
    if isinstance(prompt, int) and not isinstance(prompt, bool):  # several prompts with one continuation
        gold: Any = prompt
        prompt = choices[prompt] if 0 <= prompt < len(choices) else ""
    else:
        gold = target
    indices = tuple(_index(answer, choices) for answer in (gold if isinstance(gold, list) else [gold]))
    shown = str(target) if gold is not target else ", ".join(choices[index] for index in indices)
    return Rendered(str(prompt), shown, tuple(choices), indices)


def value_of(key: str, template: Any, row: Row, has_choices: bool) -> Any:
    """Evaluate ``doc_to_text`` or ``doc_to_target`` on a row.

    Raises:
        TemplateProblem: As ``render``.
    """
    if callable(template):
        value = template(dict(row))
        return int(value) if hasattr(value, "item") else value  # a NumPy number
    if not isinstance(template, str):
        return template
    if template in row:
        return row[template]
    text = _render(key, template, row)
    if has_choices and text.isdecimal() and len(text) <= _MAX_DIGITS:
        return int(text)
    if key == "doc_to_target" and text[:1] == "[" and text[-1:] == "]":
        try:
            return ast.literal_eval(text)
        except (SyntaxError, ValueError, MemoryError, RecursionError):
            return text
    return text


def choices_of(template: Any, row: Row) -> list[str] | None:
    """Return the choices of a row; None for a task without choices.

    Raises:
        TemplateProblem: As ``render``.
    """
    if template is None:
        return None
    if callable(template):
        choices = template(dict(row))
    elif not isinstance(template, str):
        choices = list(template.values()) if isinstance(template, Mapping) else template
    elif template in row:
        choices = row[template]
    else:
        text = _render("doc_to_choice", template, row)
        try:
            choices = ast.literal_eval(text)
        except (SyntaxError, ValueError, MemoryError, RecursionError) as error:
            raise TemplateProblem("doc_to_choice", f"does not render a list: {plain(text, 60)!r}") from error
    if (
        not isinstance(choices, list)
        or not choices
        or not all(isinstance(choice, str) and choice for choice in choices)
    ):
        raise TemplateProblem("doc_to_choice", f"is not a list of strings: {plain(repr(choices), 60)}")
    return choices


def sandboxed(key: str, template: Any, has_choices: bool) -> Any:
    """Return a function of a row that renders an untrusted template in the child process."""
    if not isinstance(template, str):
        return template
    if key == "doc_to_choice":
        return lambda row: _bounded(key, choices_of, template=template, row=dict(row))
    return lambda row: _bounded(
        key, value_of, key=key, template=template, row=dict(row), has_choices=has_choices
    )


def _bounded(key: str, function: Callable[..., Any], /, **arguments: Any) -> Any:
    """Call a function of this module in the child process.

    Raises:
        TemplateProblem: As the function, and if the template exceeds a limit.
    """
    try:
        return evaluate(function, **arguments)
    except LimitExceededError as error:
        raise TemplateProblem(key, error.need) from error
    except EvaluationError as error:
        named_key, _, problem = str(error).partition(": ")
        if TemplateProblem.__name__ in error.kinds:
            raise TemplateProblem(named_key, problem) from error
        raise TemplateProblem(key, f"fails: {plain(error, 120)}") from error


def parse(key: str, template: Any) -> None:
    """Refuse a template with invalid syntax.

    Raises:
        TemplateProblem: With the line of the template.
    """
    from jinja2 import TemplateError

    if isinstance(template, str):
        try:
            _environment().parse(template)
        except TemplateError as error:
            raise TemplateProblem(key, f"not a Jinja template: {plain(error, 120)}") from error
        except RecursionError as error:
            raise TemplateProblem(key, "not a Jinja template: nested too deeply") from error


def _index(gold: Any, choices: list[str]) -> int:
    if isinstance(gold, str) and gold in choices:
        return choices.index(gold)
    if isinstance(gold, int) and not isinstance(gold, bool) and 0 <= gold < len(choices):
        return gold
    raise TemplateProblem(
        "doc_to_target",
        f"{plain(repr(gold), 60)} is neither one of the {len(choices)} choices nor the index of one",
    )


def _render(key: str, template: str, row: Row) -> str:
    from jinja2 import TemplateError
    from jinja2.exceptions import SecurityError

    try:
        _environment().begin()
        return _template(template)(**row)
    except SecurityError as error:
        raise TemplateProblem(key, f"is not allowed in a template: {plain(error, 120)}") from error
    except TemplateError as error:
        known = ", ".join(map(str, row))
        raise TemplateProblem(key, f"{plain(error, 120)} (the row has {plain(known, 200)})") from error
    except (ValueError, TypeError, ArithmeticError, LookupError, AttributeError, re.error) as error:
        raise TemplateProblem(key, f"fails: {plain(error, 120)}") from error
    except RecursionError as error:
        raise TemplateProblem(key, "fails: it is nested too deeply, or calls itself") from error


@cache
def _template(text: str) -> Callable[..., str]:
    return _environment().from_string(text).render  # type: ignore[no-any-return]


@cache
def _environment() -> Any:
    from gym_fed.evaluation.suites.sandbox import BoundedEnvironment

    environment = BoundedEnvironment()
    environment.filters["regex_replace"] = _regex_replace
    return environment


def _regex_replace(text: str, pattern: str, repl: str, count: int = 0) -> str:
    require_quick(pattern)
    from gym_fed.evaluation.suites.sandbox import MAX_CHARACTERS

    if repl and (len(text) + 1) * len(repl) > MAX_CHARACTERS:  # a group reference may insert the whole text
        raise ValueError(f"regex_replace: {counted(len(repl), 'character')} for each match in {len(text)}")
    return re.sub(pattern, repl, text, count=count)


def first_bounded_problem(
    config: Mapping[str, Any], rows: Sequence[Row], most: int
) -> tuple[int, TemplateProblem] | None:
    """Render the first ``most`` rows with untrusted templates in the child process; return the first failure."""
    templates = {key: config.get(key) for key in TEMPLATES}
    for number, row in enumerate(rows[:most]):
        try:
            _bounded("templates", check_row, config=templates, row=dict(row))
        except TemplateProblem as problem:
            return number, problem
    return None


def check_row(config: Mapping[str, Any], row: Row) -> None:
    """Render a row in the child process, whose reply cannot hold the result."""
    render(config, row)


def require_rendering(task: str, config: Mapping[str, Any], rows: Iterable[Row]) -> None:
    """Refuse a task with a row that cannot be rendered.

    Raises:
        GymError: ``DATA_INVALID``.
    """
    for number, row in enumerate(rows):
        try:
            render(config, row)
        except TemplateProblem as problem:
            raise GymError(
                ErrorCode.DATA_INVALID,
                f"task {task}: row {number}: {problem}",
                "the data does not match the definition; see `gym eval list`",
            ) from problem
