"""The prompts of `gym-server init`. Each has a default and is repeated after an invalid answer."""

from __future__ import annotations

import shlex
import socket
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import typer
from pydantic import ValidationError

from gym_fed.config.hub.privacy import PrivacyConfig
from gym_fed.config.hub.server import ServerConfig
from gym_fed.config.schema.base import first_problem
from gym_fed.config.schema.endpoint import Endpoint
from gym_fed.core.console import err
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.core.text import whole_number
from gym_fed.trust.wire.limits import DEFAULT_PORT
from gym_server.cli.setup import HubChoices

_NONE = "none"


class _HubQuestion(NamedTuple):
    label: str
    why: str
    read: Callable[[str], Any]
    """Function that parses the typed text; raises ``GymError`` for a value that the config would refuse."""


def choose(given: Mapping[str, object], may_ask: bool) -> HubChoices:
    """Collect the settings of a new hub from flags, or from prompts if no flag is given on a terminal.

    Args:
        given: Flag values by field of ``HubChoices``; None for flags that were not given.
        may_ask: If True, prompt when no flag was given; otherwise use the defaults.

    Raises:
        GymError: The first invalid flag, with its name.
    """
    answers = {key: str(value) for key, value in given.items() if value is not None}
    if not answers and may_ask and _is_terminal():
        return _ask()
    values: dict[str, Any] = {}
    for key, text in answers.items():
        try:
            values[key] = _folder(text) if key == "base_model" else _QUESTIONS[key].read(text)
        except GymError as error:
            flag = f"--{key.replace('_', '-')}"
            raise GymError(error.code, f"{flag}: {error.message}", error.hint) from error
    return HubChoices(**values)


def _is_terminal() -> bool:
    return sys.stdin.isatty() and err.is_terminal


def _ask() -> HubChoices:
    defaults = HubChoices()
    err.print("A new hub. Enter accepts the value in brackets; Ctrl-C cancels.")
    values: dict[str, Any] = {}
    for number, (key, question) in enumerate(_QUESTIONS.items(), start=1):
        err.print(f"\n{number}/{len(_QUESTIONS)}  {question.why}", style="dim")
        if key == "address" and (here := _own_address()):
            err.print(f"     this machine's local address is {here}:{DEFAULT_PORT}", style="dim")
        values[key] = _answer(question, getattr(defaults, key) or _NONE)
    err.print()
    return HubChoices(**values)


def _answer(question: _HubQuestion, default: object) -> Any:
    """Prompt until the answer is valid, and return it."""
    while True:
        typed = typer.prompt(question.label, default=str(default), err=True)
        try:
            return question.read(typed.strip())
        except GymError as error:
            err.print(error.message, style="red")
            if error.hint:
                err.print(f"  {error.hint}", style="dim")


def _base_model(text: str) -> str:
    from gym_fed.base.models import resolve

    resolve(text)
    return _folder(text)


def _folder(text: str) -> str:
    """Return the absolute path of a folder or file, since the hub may be started anywhere; model names are kept."""
    path = Path(text).expanduser()
    return str(path.absolute()) if path.exists() else text


def _name(text: str) -> str:
    _require({"name": text})
    return text


def _enrolment(text: str) -> str:
    _require({"enrolment": {"policy": text}})
    return text


def _address(text: str) -> str:
    """Parse ``host:port``, or a host alone with the default port."""
    try:
        Endpoint.parse(text)
    except ValueError as error:
        with suppress(ValueError):
            Endpoint.parse(f"{text}:{DEFAULT_PORT}")
            return _address(f"{text}:{DEFAULT_PORT}")
        raise GymError(ErrorCode.CONFIG_INVALID, str(error), "write it like hub.example.org:9443") from error
    _require({"advertise": text})
    return text


def _rows(example: str, text: str) -> str | None:
    """Return the absolute path of a data file, or ``task:`` names, after checking that it has at least one row."""
    if text == _NONE:
        return None
    from gym_fed.data.rows import as_kind
    from gym_server.rounds.hub_model import coordinator_rows

    source = text if text.startswith("task:") else str(Path(text).expanduser().absolute())
    try:
        rows = as_kind(coordinator_rows(source, "auto", 1, Path(), "heldout"), "supervised")
    except GymError as error:
        if "--columns" not in error.hint:  # no prompt or flag of this command accepts it
            raise
        columns = "--columns prompt=THEIRS,completion=THEIRS"
        again = f"convert it with: gym data convert {shlex.quote(text)} {example} --to completion {columns}"
        raise GymError(error.code, error.message, again) from error
    if not rows:
        raise GymError(ErrorCode.DATA_INVALID, f"{text} has no rows", f"enter a file with rows, or {_NONE}")
    return source


def _num_rounds(text: str) -> int:
    return _number("num_rounds", text)


def _min_contributors(text: str) -> int:
    return _number("min_contributors", text)


def _epsilon(text: str) -> float | None:
    if text == _NONE:
        return None
    try:
        return PrivacyConfig.model_validate({"epsilon": text}).epsilon
    except ValidationError as error:
        raise GymError(
            ErrorCode.CONFIG_INVALID, first_problem(error), f"8 is usual; {_NONE} for no noise"
        ) from error


def _number(key: str, text: str) -> int:
    number = whole_number(text, 9)
    _require({"rounds": {key: text if number is None else number}})
    assert number is not None
    return number


def _require(values: dict[str, Any]) -> None:
    """Raise ``CONFIG_INVALID`` for values that the config would refuse."""
    try:
        ServerConfig.model_validate(values)
    except ValidationError as error:
        raise GymError(ErrorCode.CONFIG_INVALID, first_problem(error)) from error


def _own_address() -> str:
    """Return this machine's address on its default route; empty if it has none. No packet is sent."""
    with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect(("192.0.2.1", 9))  # reserved for documentation (RFC 5737)
        return str(probe.getsockname()[0])
    return ""


_QUESTIONS = {
    "base_model": _HubQuestion(
        "Base model", "The model to train: gym-nano (included), a folder, or a name on the Hub.", _base_model
    ),
    "name": _HubQuestion("Name", "The hub's name, shown to contributors.", _name),
    "enrolment": _HubQuestion(
        "Who may join",
        "invite: with an invite; open: everybody; allow-list: ids that you list.",
        _enrolment,
    ),
    "address": _HubQuestion(
        "Address", "HOST:PORT of this hub for contributors; 127.0.0.1: this machine only.", _address
    ),
    "heldout": _HubQuestion(
        "Held-out data",
        "Rows to test each version: a file or task:NAME. none: no tests.",
        partial(_rows, "heldout.jsonl"),
    ),
    "root_data": _HubQuestion(
        "Clean rows",
        "100 other rows to judge large updates by (safer and fairer), or none.",
        partial(_rows, "root.jsonl"),
    ),
    "num_rounds": _HubQuestion("Rounds", "Number of versions that the run creates.", _num_rounds),
    "min_contributors": _HubQuestion(
        "Quorum", "Updates a round waits for; 3 or more can outvote one malicious update.", _min_contributors
    ),
    "epsilon": _HubQuestion(
        "Privacy budget",
        "Epsilon of all rounds; adds noise to the soups, selects the rule. Or none.",
        _epsilon,
    ),
}
"""Prompts by field of ``HubChoices``, in order."""
