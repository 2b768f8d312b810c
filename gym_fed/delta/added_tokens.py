"""Tokens that a fine-tune added to its base, as a ``.gymdelta``'s manifest lists them, and the names of their rows.

The rows of added tokens are tensors of the file called ``NAME[FIRST:]``: the values of the rows of the parameter
``NAME`` from row ``FIRST`` to the end of the vocabulary. They replace or follow the base's rows: ``FIRST`` is smaller
than the base's number of rows if the base is padded, and the first added token has an unused row. This module does
not import torch.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from gym_fed.base.modeling.vocabulary import FLAGS, ROLES
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.core.text import counted, plain

MAX_ADDED_TOKENS = 65_536
MAX_TOKEN_CHARS = 256
MAX_SERVED_TEXT_BYTES = 128 * 2**10
"""Maximum UTF-8 bytes of the texts in a served variant. Other requests wait while they are compiled, 2 us per byte."""
MAX_ROW_TENSORS = 4
"""Embeddings, head, and its bias; plus one spare."""
MAX_VOCABULARY = 1 << 24

_ROWS = re.compile(r"(.+)\[([1-9]\d{0,8}):\]", re.ASCII)
_SHOWN = 4


@dataclass(frozen=True)
class AddedToken:
    """One token: its id, its text, and its properties (of ``FLAGS``, sorted)."""

    id: int
    text: str
    flags: tuple[str, ...] = ()


@dataclass(frozen=True)
class AddedTokens:
    """The manifest's key ``vocabulary``.

    Attributes:
        tokens: The added tokens, in order of their ids.
        roles: The text of each special token (of ``ROLES``) that differs from the base's.
        changed: Tokens that the base has under the same ids, with other properties.
    """

    tokens: tuple[AddedToken, ...] = ()
    roles: Mapping[str, str] = field(default_factory=dict)
    changed: tuple[AddedToken, ...] = ()

    def __bool__(self) -> bool:
        """True if there is anything to write."""
        return bool(self.tokens or self.roles or self.changed)

    def to_value(self) -> dict[str, Any]:
        """Convert to plain data for JSON."""
        value: dict[str, Any] = {"tokens": [[t.id, t.text, list(t.flags)] for t in self.tokens]}
        if self.changed:
            value["changed"] = [[t.id, t.text, list(t.flags)] for t in self.changed]
        return value | ({"roles": dict(self.roles)} if self.roles else {})

    @classmethod
    def parse(cls, value: Any) -> AddedTokens:
        """Parse untrusted JSON.

        Raises:
            GymError: ``DELTA_INVALID``.
        """
        if not isinstance(value, dict) or not {"tokens"} <= value.keys() <= {"tokens", "changed", "roles"}:
            raise _invalid("manifest key 'vocabulary' is not an object of tokens, changed and roles")
        lists, roles = (value["tokens"], value.get("changed", [])), value.get("roles", {})
        if any(not isinstance(rows, list) or len(rows) > MAX_ADDED_TOKENS for rows in lists):
            raise _invalid(f"vocabulary: tokens and changed are not lists of at most {MAX_ADDED_TOKENS}")
        if not isinstance(roles, dict) or not all(k in ROLES and _is_text(v) for k, v in roles.items()):
            raise _invalid(f"vocabulary: roles is not an object of texts for {', '.join(ROLES)}")
        tokens, changed = (tuple(map(_token, rows)) for rows in lists)
        every = tokens + changed
        in_order = all([t.id for t in part] == sorted({t.id for t in part}) for part in (tokens, changed))
        if not in_order or not len({t.text for t in every}) == len({t.id for t in every}) == len(every):
            raise _invalid("vocabulary: tokens are not in ascending order of ids, or one is listed twice")
        return cls(tokens, roles, changed)


@dataclass(frozen=True)
class AddedRows:
    """The rows of added tokens in a file: ``first`` to ``size`` (excluded) of the parameters ``names``."""

    first: int
    size: int
    names: tuple[str, ...]

    @classmethod
    def of(cls, shapes: Mapping[str, tuple[int, ...]]) -> AddedRows | None:
        """Collect the rows among the tensors of a file; None without any.

        Raises:
            GymError: ``DELTA_INVALID`` if they do not extend all parameters alike.
        """
        parts = {name: part for name in shapes if (part := split_rows(name)) is not None}
        if not parts:
            return None
        ranges = {(first, first + shapes[name][0]) for name, (_, first) in parts.items() if shapes[name]}
        if len(ranges) != 1 or not all(shapes[name] for name in parts):
            raise _invalid(f"tensors {shown_tokens(parts)}: their first and last row numbers differ")
        ((first, size),) = ranges
        if size > MAX_VOCABULARY:
            rows = counted(size, "row")
            raise _invalid(f"tensor {min(parts)!r}: a vocabulary of {rows}, over {MAX_VOCABULARY}")
        return cls(first, size, tuple(sorted(name for name, _ in parts.values())))


def require_rows(tokens: AddedTokens, rows: AddedRows | None) -> None:
    """Check that every added token has a row in the file.

    Raises:
        GymError: ``DELTA_INVALID`` naming the first token without one.
    """
    for token in tokens.tokens:
        if rows is None or not rows.first <= token.id < rows.size:
            raise _invalid(f"vocabulary: token {plain(token.text, 40)!r} ({token.id}) has no row in the file")


def split_rows(name: str) -> tuple[str, int] | None:
    """Split ``NAME[FIRST:]`` into the parameter's name and the first row; None for any other tensor."""
    match = _ROWS.fullmatch(name)
    return None if match is None else (match[1], int(match[2]))


def rows_name(name: str, first: int) -> str:
    """Return the name of the tensor with a parameter's rows from ``first`` on."""
    return f"{name}[{first}:]"


def fits_base(name: str, shape: tuple[int, ...], base: Mapping[str, tuple[int, ...]]) -> bool:
    """Return True if a tensor of a file is one of the base's, or holds the last rows of one of them."""
    if name in base:
        return shape == tuple(base[name])
    part = split_rows(name)
    whole = None if part is None else base.get(part[0])
    if part is None or not whole or not shape or shape[1:] != tuple(whole[1:]):
        return False
    return part[1] <= whole[0] <= part[1] + shape[0]


def unnamed_rows(first: int, size: int, ids: Iterable[int]) -> str:
    """Return the ranges of rows that no token names, such as ``49155-49279``; empty without any."""
    named = set(ids)
    return written_ranges(row for row in range(first, size) if row not in named)


def written_ranges(numbers: Iterable[int]) -> str:
    """Write ascending numbers as ranges, such as ``0-3,5``."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and runs[-1][1] == number - 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ",".join(str(low) if low == high else f"{low}-{high}" for low, high in runs)


def shown_tokens(tokens: Iterable[str]) -> str:
    """Return the first few tokens for messages, escaped."""
    texts = list(tokens)
    more = f" and {len(texts) - _SHOWN} more" if len(texts) > _SHOWN else ""
    return ", ".join(repr(plain(text, 40)) for text in texts[:_SHOWN]) + more


def refuse_added(tokens: AddedTokens, rows: AddedRows | None) -> None:
    """Refuse a delta with a larger vocabulary where only the base's can be used.

    Raises:
        GymError: ``BASE_MISMATCH`` with the tokens.
    """
    if not tokens and rows is None:
        return
    changes, named = [], ""
    if tokens.tokens:
        changes.append(f"adds {counted(len(tokens.tokens), 'token')} to its base's tokenizer")
        named = f" ({shown_tokens(token.text for token in tokens.tokens)})"
    elif tokens:
        changed = [*(token.text for token in tokens.changed), *sorted(tokens.roles)]
        changes.append(f"changes {shown_tokens(changed)} of its base's tokenizer")
    if rows is not None:
        changes.append(f"replaces embedding rows {rows.first} to {rows.size - 1}")
    raise GymError(
        ErrorCode.BASE_MISMATCH,
        f"{' and '.join(changes)}{named}, but only the base's own vocabulary is supported",
        "apply it and use the model: gym delta apply BASE FILE -o FOLDER",
    )


def require_servable_tokens(tokens: AddedTokens, name: str) -> None:
    """Check that a server can build a tokenizer with these tokens without delaying its other requests.

    Raises:
        GymError: ``MODEL_INVALID``.
    """
    every = tokens.tokens + tokens.changed
    size = sum(len(token.text.encode("utf-8", "surrogatepass")) for token in every)
    if size > MAX_SERVED_TEXT_BYTES:
        raise GymError(
            ErrorCode.MODEL_INVALID,
            f"{name}: the texts of its {counted(len(every), 'added token')} have {counted(size, 'byte')}, but a "
            f"variant may have {counted(MAX_SERVED_TEXT_BYTES, 'byte')}",
            "add fewer or shorter tokens, or apply it and serve the model: gym delta apply BASE FILE -o FOLDER",
        )


def _token(row: Any) -> AddedToken:
    if not isinstance(row, list) or [type(value) for value in row] != [int, str, list]:
        raise _invalid(f"vocabulary: {plain(row, 80)} is not [id, text, flags]")
    number, text, flags = row
    if not _is_text(text):
        raise _invalid(
            f"vocabulary: token {plain(number, 40)} has {counted(len(text), 'character')}, not 1 to {MAX_TOKEN_CHARS}"
        )
    if not 0 <= number < MAX_VOCABULARY:
        raise _invalid(f"vocabulary: token {plain(text, 40)!r} has the id {plain(number, 40)}")
    if any(flag not in FLAGS for flag in flags) or flags != sorted(set(flags)):
        raise _invalid(f"vocabulary: token {plain(text, 40)!r} has flags other than {', '.join(FLAGS)}")
    return AddedToken(number, text, tuple(flags))


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and 0 < len(value) <= MAX_TOKEN_CHARS


def _invalid(message: str) -> GymError:
    return GymError(ErrorCode.DELTA_INVALID, message)
