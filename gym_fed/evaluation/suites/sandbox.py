"""A Jinja sandbox for untrusted templates, with limits on text sizes and loops."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import wraps
from threading import local
from types import BuiltinMethodType
from typing import Any

from jinja2 import BaseLoader, StrictUndefined, nodes
from jinja2.exceptions import SecurityError
from jinja2.sandbox import SandboxedEnvironment, SandboxedFormatter
from jinja2.visitor import NodeTransformer

MAX_CHARACTERS = 10_000_000
"""Maximum size of an operation's result; prompts are far shorter."""
MAX_STEPS = 200_000
"""Maximum loop iterations and calls of one rendering."""
_MAX_BITS = 1 << 20
_NUMBER = re.compile(r"\d+")
_CONTAINERS = (list, tuple, set, frozenset, dict)
_WIDE = ("batch", "center", "round", "slice")
"""Filters whose result is as large as a numeric argument."""
_EACH = ("indent", "tojson", "wordwrap")
"""Filters that insert an argument in many places of a text."""


class BoundedEnvironment(SandboxedEnvironment):
    """A sandboxed environment that also bounds the size of results."""

    intercepted_binops = frozenset({"*", "**", "%", "+"})

    def __init__(self) -> None:
        super().__init__(
            loader=BaseLoader(), undefined=StrictUndefined, keep_trailing_newline=True, finalize=_printable
        )
        del self.globals["lipsum"]
        self._steps = local()
        checks: dict[str, Callable[..., None]] = {"join": _join, "replace": _replace, "format": _format}
        checks |= dict.fromkeys(_WIDE, _width) | dict.fromkeys(_EACH, _product)
        for name, check in checks.items():
            self.filters[name] = _after(check, self.filters[name])
        for name in list(self.filters):
            self.filters[name] = _after(_arguments, self.filters[name])
        self.filters["counted iterations"] = self._counted_iterations

    def begin(self) -> None:
        """Reset the step counter for a new rendering."""
        self._steps.done = 0

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        """See ``SandboxedEnvironment``."""
        if operator == "**":
            raise SecurityError("** with a result of this size")
        if operator == "%" and isinstance(left, str):
            _format(left, *(right if isinstance(right, tuple) else (right,)))
        elif operator == "+" and hasattr(left, "__len__") and hasattr(right, "__len__"):
            _require("+", len(left) + len(right))
        elif operator == "*" and (hasattr(left, "__len__") or hasattr(right, "__len__")):
            _require("*", _size(left) * _size(right))
        elif isinstance(left, int) and isinstance(right, int):
            _require(operator, (left.bit_length() + right.bit_length()) * (MAX_CHARACTERS // _MAX_BITS))
        return super().call_binop(context, operator, left, right)

    def call(__self, __context: Any, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        """See ``SandboxedEnvironment``."""
        __self._step()
        _arguments(*args, **kwargs)
        is_method = isinstance(__obj, BuiltinMethodType) and isinstance(__obj.__self__, str | bytes | int)
        if is_method and (check := _METHODS.get(__obj.__name__)) is not None:
            check(__obj.__self__, *args, **kwargs)
        return super().call(__context, __obj, *args, **kwargs)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        """See ``SandboxedEnvironment``."""
        if super().wrap_str_format(value) is None:
            return None
        text, is_map = value.__self__, value.__name__ == "format_map"

        def formatted(*args: Any, **kwargs: Any) -> str:
            return _Formatter(self).vformat(text, *(((), args[0]) if is_map else (args, kwargs)))

        return formatted

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        return _LoopCounter().visit(super()._parse(source, name, filename))  # type: ignore[no-any-return]

    def _counted_iterations(self, values: Any) -> Iterator[Any]:
        for value in values:
            self._step()
            yield value

    def _step(self) -> None:
        self._steps.done = getattr(self._steps, "done", 0) + 1
        if self._steps.done > MAX_STEPS:
            raise SecurityError(f"more than {MAX_STEPS} loop iterations and calls")


class _LoopCounter(NodeTransformer):
    """Counts loop iterations, and bounds texts joined with ``~`` like those joined with ``+``."""

    def visit_For(self, node: nodes.For) -> nodes.For:
        self.generic_visit(node)
        node.iter = _filtered(node.iter, "counted iterations")
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Expr:
        self.generic_visit(node)
        joined: nodes.Expr = _filtered(node.nodes[0], "string")
        for part in node.nodes[1:]:
            joined = nodes.Add(joined, _filtered(part, "string"), lineno=node.lineno)
        assert node.environment is not None
        joined.set_environment(node.environment)
        return joined


class _Formatter(SandboxedFormatter):
    """Bounds the output of all fields of ``str.format``."""

    def __init__(self, environment: BoundedEnvironment) -> None:
        super().__init__(environment)
        self._size = 0

    def format_field(self, value: Any, format_spec: str) -> Any:
        self._size += sum(map(_number, _NUMBER.findall(format_spec)))
        _require("format", self._size)
        _printable(value)
        field = super().format_field(value, format_spec)
        self._size += len(field)
        return field


def _filtered(node: nodes.Node, name: str) -> nodes.Expr:
    return nodes.Filter(node, name, [], [], None, None, lineno=node.lineno, environment=node.environment)


def _after(check: Callable[..., None], function: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a filter with a check of its arguments."""
    skipped = 1 if hasattr(function, "jinja_pass_arg") else 0

    @wraps(function)
    def checked(*args: Any, **kwargs: Any) -> Any:
        given = [list(argument) if isinstance(argument, Iterator) else argument for argument in args]
        check(*given[skipped:], **kwargs)
        return function(*given, **kwargs)

    return checked


def _require(result: str, size: int) -> None:
    if size > MAX_CHARACTERS:
        raise SecurityError(f"{result} with a result of this size")


def _arguments(*args: Any, **kwargs: Any) -> None:
    for argument in (*args, *kwargs.values()):
        _printable(argument)


def _printable(value: Any) -> Any:
    if isinstance(value, _CONTAINERS):
        _require("a list", _text_size(value))
    return value


def _text_size(value: Any) -> int:
    """Return a lower bound of a value's size as text, counting until the limit."""
    size, waiting = 0, [value]
    while waiting and size <= MAX_CHARACTERS:
        item = waiting.pop()
        if isinstance(item, str | bytes):
            size += len(item) + 1
        elif isinstance(item, Mapping):
            size += 2 + len(item)
            waiting += [*item.keys(), *item.values()]
        elif isinstance(item, _CONTAINERS):
            size += 2 + len(item)
            waiting += item
        else:
            size += 1
    return size


def _size(value: Any) -> int:
    return len(value) if hasattr(value, "__len__") else abs(value) if isinstance(value, int) else 1


def _number(digits: str) -> int:
    return int(digits) if len(digits) < 18 else 10**18


def _width(_: Any, *args: Any, **kwargs: Any) -> None:
    for argument in (*args, *kwargs.values()):
        if isinstance(argument, int):
            _require("a width", argument)


def _product(value: Any, *args: Any, **kwargs: Any) -> None:
    size = _text_size(value)
    for argument in (*args, *kwargs.values()):
        size *= max(1, _size(argument))
    _require("a width", size)


def _format(text: Any, *args: Any, **kwargs: Any) -> None:
    """Bound ``%`` formatting: each number in the text, and each value for every time it may be inserted."""
    text = str(text)
    shown = [*args, *kwargs.values()]
    numbers = sum(map(_number, _NUMBER.findall(text))) if "%" in text else 0
    stars = sum(abs(value) for value in shown if isinstance(value, int)) if "*" in text else 0
    by_name = text.count("%(") if any(isinstance(value, Mapping) for value in shown) or kwargs else 1
    _require("%", len(text) + numbers + stars + max(1, by_name) * sum(map(_text_size, shown)))


def _join(values: Iterable[Any], d: Any = "", attribute: Any = None) -> None:
    parts = list(values)
    _require("join", _text_size(parts) + len(parts) * _size(d))


def _joined(text: Any, values: Iterable[Any]) -> None:
    if isinstance(values, _CONTAINERS):
        _join(values, text)


def _replace(text: Any, old: Any, new: Any, count: Any = None) -> None:
    text, old, new = str(text), str(old), str(new)
    _require("replace", len(text) + text.count(old) * len(new))


def _expandtabs(text: Any, tabsize: int = 8) -> None:
    _require("expandtabs", len(text) + text.count("\t") * tabsize)


def _translate(text: Any, table: Mapping[Any, Any]) -> None:
    longest = max(
        (_size(replacement) for replacement in table.values() if isinstance(replacement, str)), default=1
    )
    _require("translate", len(text) * longest)


_METHODS: dict[str, Callable[..., None]] = {
    **dict.fromkeys(("center", "ljust", "rjust", "zfill"), _width),
    "expandtabs": _expandtabs,
    "join": _joined,
    "replace": _replace,
    "to_bytes": _width,
    "translate": _translate,
}
