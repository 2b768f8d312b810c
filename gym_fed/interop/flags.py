"""Convert config keys typed as flags (``--learning_rate 1e-4``, ``--lora.r 8``) to the command's ``--set`` option."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.core.json_files import MAX_DEPTH

_TRUTH = dict.fromkeys(("true", "yes", "on", "1"), True) | dict.fromkeys(("false", "no", "off", "0"), False)
_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?")
_SOURCES = ("data", "eval_data")


def split_flags(
    words: Sequence[str],
    options: Mapping[str, bool],
    switches: Mapping[str, Collection[str]] | Sequence[str] = (),
    lists: Sequence[str] = (),
) -> tuple[list[str], dict[str, list[str]]]:
    """Split a command line into arguments and options of the command, and flags that it does not have.

    Args:
        words: The words after the command.
        options: The command's own options; True for those that take a value.
        switches: Keys that are true if no value follows; a mapping also gives the values that each accepts in addition
            to truth values.
        lists: Keys that take every value up to the next flag.

    Returns:
        The remaining words, and the values of each key.
    """
    taken = switches if isinstance(switches, Mapping) else dict.fromkeys(switches, ())
    left: list[str] = []
    flags: dict[str, list[str]] = {}
    at = 0
    while at < len(words):
        word = words[at]
        at += 1
        if word == "--":
            return [*left, word, *words[at:]], flags
        name, equals, value = word.partition("=")
        if not word.startswith("--") or name in options:
            left.append(word)
            if word.startswith("-") and options.get(name) and not equals and at < len(words):
                left.append(words[at])
                at += 1
            continue
        key = name[2:].replace("-", "_")
        values = [value] if equals else []
        while not equals and at < len(words) and not words[at].startswith("--"):
            if values and key not in lists:
                break
            if key in taken and words[at].lower() not in _TRUTH and words[at] not in taken[key]:
                break
            values.append(words[at])
            at += 1
        flags.setdefault(key, []).extend(values)
    return left, flags


def plain_value(values: Sequence[str]) -> Any:
    """Parse the text of a flag without a schema: a boolean, a number, JSON or YAML in brackets, or text."""
    if not values:
        return True
    text = " ".join(values)
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    if _NUMBER.fullmatch(text):
        return int(text) if text.lstrip("+-").isdecimal() else float(text)
    if text[:1] in ("[", "{"):
        return _bracketed(text)
    return None if text in ("null", "none", "None") else text


def as_settings(words: Sequence[str], options: Mapping[str, bool]) -> list[str]:
    """Return the arguments of ``gym train`` with each flag that names a key rewritten as ``--set KEY=VALUE``.

    Args:
        words: The words after the command.
        options: The command's own options, and whether each takes a value.
    """
    from gym_fed.config.train.training import TrainingConfig
    from gym_fed.interop.llamafactory.translation import is_llamafactory

    fields = TrainingConfig.model_fields
    members = {name: _members(field.annotation) for name, field in fields.items()}
    switches: dict[str, Collection[str]] = {
        name: [member for member in found if isinstance(member, str)]
        for name, found in members.items()
        if bool in found and str not in found  # a key that takes any text always consumes the next word
    }
    left, flags = split_flags(words, options, {**switches, **dict.fromkeys(_SWITCHES, ())}, _SOURCES)
    left = _without_pairs(left, options, flags)
    is_foreign = is_llamafactory(dict.fromkeys(flags, True))
    columns = [] if is_foreign else flags.pop("columns", [])
    if is_foreign and not {"do_train", "do_eval", "do_predict"} & set(flags):
        flags["do_train"] = []
    given: dict[str, Any] = {}
    for key, values in flags.items():
        if not values:
            _require_switch(key, TrainingConfig)
        given[key] = plain_value(values) if is_foreign else _value(key, values, TrainingConfig)
    if columns:
        _name_columns(given, " ".join(columns))
    return left + [word for key, value in given.items() for word in ("--set", f"{key}={json.dumps(value)}")]


def as_typed(message: str, words: Sequence[str]) -> str:
    """Rewrite an error about ``--set`` so that it names the flags that the user typed.

    Args:
        message: The error; lines about a key begin with ``--set: KEY: ``.
        words: The command line as typed.
    """
    typed = {word[2:].partition("=")[0].replace("-", "_"): word.partition("=")[0] for word in words}
    return "\n".join(
        f"{typed[key[1]]}: {line[key.end() :]}"
        if (key := _SETTING.match(line)) and typed.get(key[1], "").startswith("--")
        else line
        for line in message.split("\n")
    )


_SETTING = re.compile(r"--set: ([\w.]+): ")


def _require_switch(key: str, schema: Any) -> None:
    """Refuse a flag without a value, unless its key is a switch.

    Raises:
        GymError: ``USAGE``.
    """
    members = _annotation(key, schema)
    if any(hasattr(member, "model_fields") for member in members):
        remedy = _SECTIONS.get(key, f"set one of its keys: --{key}.KEY VALUE")
        raise GymError(ErrorCode.USAGE, f"--{key} is a section, not a key", remedy)
    if members and bool not in members and Any not in members:
        raise GymError(ErrorCode.USAGE, f"--{key}: no value", f"write it after the flag: --{key} VALUE")


_SECTIONS = {
    "lora": "to train an adapter: --finetuning lora; a key of the section: --lora.r 8",
    "quantization": "for a base in 4 bits: --quantization.bits 4",
}
"""Hints for a section that is given without a key."""


def _name_columns(given: dict[str, Any], text: str) -> None:
    """Apply ``--columns prompt=question,completion=answer`` to each file of ``--data`` and ``--eval_data``.

    Without these flags it applies to the config's first source.
    """
    from gym_fed.data.reading import parse_columns

    columns = parse_columns(text)
    lists = [given[key] for key in _SOURCES if isinstance(given.get(key), list)]
    if not lists:
        given["data.0.columns"] = columns
    for source in (source for sources in lists for source in sources):
        if isinstance(source, dict) and "path" in source:
            source.setdefault("columns", columns)


_SWITCHES = (
    "do_train", "do_eval", "do_predict", "bf16", "fp16", "overwrite_output_dir", "overwrite_cache", "plot_loss",
)  # fmt: skip
"""LLaMA-Factory's keys that may be written without a value."""


def _without_pairs(left: list[str], options: Mapping[str, bool], flags: dict[str, list[str]]) -> list[str]:
    """Move ``key=value`` after a config file, as in LLaMA-Factory's command, to the flags."""
    others: list[str] = []
    for before, word in zip(["", *left], left, strict=False):
        key, equals, value = word.partition("=")
        is_pair = equals and re.fullmatch(r"[a-z]\w*(\.\w+)*", key) and not Path(word).exists()
        if is_pair and not options.get(before) and others:
            flags[key] = [value]
        else:
            others.append(word)
    return others


def _value(key: str, values: list[str], schema: Any) -> Any:
    """Parse the value of a gym-fed flag by the type of its key."""
    if key in _SOURCES:
        from gym_fed.interop.training_keys import sources

        if not values:
            raise GymError(ErrorCode.USAGE, f"--{key}: no value", f"for example --{key} my.jsonl")
        return _bracketed(values[0]) if values[0][:1] in ("[", "{") else sources(values)
    if not values:
        return True
    members = _annotation(key, schema)
    text = values[0]
    if text in ("null", "none", "None") and type(None) in members and "none" not in members:
        return None
    if text[:1] in ("[", "{"):
        return _bracketed(text)
    if bool in members and text.lower() in _TRUTH and text not in members and not {int, float} & set(members):
        return _TRUTH[text.lower()]
    if not members or Any in members:
        return plain_value(values)
    return text


def _annotation(key: str, schema: Any) -> list[Any]:
    """Return the types that a key accepts; empty for an unknown or untyped key."""
    first, _, rest = key.partition(".")
    if rest.count(".") > MAX_DEPTH:
        raise GymError(ErrorCode.USAGE, f"--{key[:80]}...: a key has at most {MAX_DEPTH} dots")
    field = getattr(schema, "model_fields", {}).get(first)
    if field is None:
        return []
    members = _members(field.annotation)
    if not rest:
        return members
    return next((types for inner in members if (types := _annotation(rest, inner))), [])


def _members(annotation: Any) -> list[Any]:
    """Return the members of a union, with the values of its literals."""
    parts = get_args(annotation)
    is_container = isinstance(annotation, type) or getattr(annotation, "__origin__", None) in (list, dict)
    return (
        [annotation] if not parts or is_container else [member for part in parts for member in _members(part)]
    )


def _bracketed(text: str) -> Any:
    from gym_fed.core.plain_yaml import parse_value

    try:
        return parse_value(text)
    except ValueError as error:
        problem = f"{text[:80]!r} is neither JSON nor YAML: {error}"
        raise GymError(ErrorCode.USAGE, problem, "close the brackets") from error
