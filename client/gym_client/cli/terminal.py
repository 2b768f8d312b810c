"""Prompts, tables and signal handlers of the terminal."""

from __future__ import annotations

import hashlib
import json
import signal
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import TYPE_CHECKING, Any

import typer

from gym_client.identity.address import Address
from gym_fed.core.console import TextTable, err
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.core.text import counted, plain, readable_bytes

if TYPE_CHECKING:
    from gym_client.agent.agreement import Renewal
    from gym_client.base.offer import BaseOffer
    from gym_client.cli.offer import Offer
    from gym_client.ledger.restored import Loss


class Consent:
    """Interface for the user's consent. The command line prompts on the terminal; tests answer automatically."""

    def server_key(self, address: Address, fingerprint: str) -> bool:
        """Return True to trust a key that is not certified by a known authority."""
        raise NotImplementedError

    def local_copy(self, name: str) -> bool:
        """Return True to read the local copy of a base that only the hub has named."""
        raise NotImplementedError

    def base(self, offer: BaseOffer) -> bool:
        """Return True to fetch a base that is missing on this machine, which requires enrolment."""
        raise NotImplementedError

    def offer(self, offer: Offer) -> bool:
        """Return True to join on these terms."""
        raise NotImplementedError

    def renewed(self, renewal: Renewal) -> bool:
        """Return True to continue with a hub whose terms have changed."""
        raise NotImplementedError

    def accepts(self, name: str) -> bool:
        """Return True if the terms with this identifier were accepted on the command line."""
        return False

    def accepts_offer(self, offer: Offer) -> bool:
        """Return True if these terms were accepted on the command line, whatever their costs."""
        return False

    def restored(self, loss: Loss) -> bool:
        """Return True to continue with a hub that was restored from a backup and lost the given records."""
        raise NotImplementedError


MAX_TERM = 1000
"""Maximum characters of one line of the terms."""
_COLUMNS, _MAX_CHANGES = 80, 11
_ALL_CHANGES = "all {} in full: gym-client join --json"


class TerminalConsent(Consent):
    """Displays the terms and prompts for consent.

    ``--yes`` accepts all prompts except those for a restored hub. It is required if there is no terminal.

    Args:
        yes: Accept all prompts.
        as_json: Print the terms as JSON to standard output.
        accept_restore: Continue with a restored hub; ``yes`` does not imply this.
        accepted: Identifiers of terms passed to ``--accept``; JSON output contains them as ``accept``.
    """

    def __init__(
        self, yes: bool, as_json: bool, accept_restore: bool = False, accepted: Iterable[str] = ()
    ) -> None:
        self._yes = yes
        self._as_json = as_json
        self._accept_restore = accept_restore
        self._accepted = frozenset(accepted)

    def server_key(self, address: Address, fingerprint: str) -> bool:
        if self._as_json:
            self._write({"event": "server-key", "address": str(address), "fingerprint": fingerprint})
        else:
            err.print(f"{address} is new here. Its key: {fingerprint}")
            err.print("Compare it with what the coordinator published.")
            err.print("From now on only this key is accepted.")
        return self._ask(
            "Is this the right key?",
            f"the key of {address} is not known: {fingerprint}",
            "--fingerprint, or --yes",
        )

    def local_copy(self, name: str) -> bool:
        if self._is_accepted({"event": "local-copy", "base_model": name}):
            return True
        return self._ask(
            f"The hub trains {name}. Read your local copy of it, if there is one, to work out the terms?",
            f"the hub trains {name}; reading a local copy needs your consent",
            "--base PATH, or --yes",
        )

    def base(self, offer: BaseOffer) -> bool:
        if self._is_accepted(
            {"event": "base-offer", **offer.to_dict()},
            named={"event": "base-offer", **offer.fixed_terms()},
            lines=[["", plain(line, MAX_TERM)] for line in offer.lines()],
        ):
            return True
        if not self._as_json:
            for line in offer.lines():
                err.print(plain(line, MAX_TERM))
        return self._ask(
            "Fetch it?", f"fetching {offer.summary()} needs your consent", "--base PATH, or --yes"
        )

    def offer(self, offer: Offer) -> bool:
        from gym_client.cli.terms_in_words import offer_lines, offer_panel

        if self._is_accepted(
            {"event": "offer", **offer.to_dict()},
            named=_named(offer),
            lines=[[label, plain(text, 2 * MAX_TERM)] for label, text in offer_lines(offer)],
        ):
            return True
        if err.is_terminal and not self._as_json:
            err.print(offer_panel(offer))
        elif not self._as_json:
            for label, text in offer_lines(offer):
                err.print(plain(f"{label}: {text}" if label else f"  {text}", 2 * MAX_TERM))
        return self._ask("Join on these terms?", "joining needs your consent", "--yes")

    def renewed(self, renewal: Renewal) -> bool:
        if self._as_json:
            self._write({"event": "terms-changed", **renewal.to_dict()})
        else:
            err.print("The hub has changed the terms of its rounds:")
            lines = [plain(f"  {line}", MAX_TERM) for line in renewal.changes]
            for line in _screenful(lines) if err.is_terminal else lines:
                err.print(line)
        if self._yes or self.accepts(renewal.name):
            return True
        if not (sys.stdin.isatty() and err.is_terminal):
            return False
        return _answer("Continue with these terms?")

    def accepts(self, name: str) -> bool:
        return name in self._accepted

    def accepts_offer(self, offer: Offer) -> bool:
        return self.accepts(_identifier("offer", _named(offer)))

    def restored(self, loss: Loss) -> bool:
        if self._as_json:
            self._write({"event": "hub-restored", **loss.to_dict()})
        else:
            for line in loss.lines():
                err.print(line)
        if self._accept_restore:
            return True
        if not (sys.stdin.isatty() and err.is_terminal):
            return False
        return _answer("Continue with the hub as it is now?")

    def _ask(self, question: str, problem: str, remedy: str) -> bool:
        return self._yes or confirm(question, problem, remedy)

    def _is_accepted(
        self, question: dict[str, Any], named: dict[str, Any] | None = None, **shown: Any
    ) -> bool:
        """Return True if the question was already accepted.

        JSON output contains the question's identifier, a digest of ``named``, or of the whole question.
        """
        name = _identifier(question["event"], named or question)
        if self._as_json:
            self._write({**question, **shown, "accept": name})
        return self.accepts(name)

    def _write(self, value: dict[str, Any]) -> None:
        sys.stdout.write(json.dumps(value, sort_keys=True) + "\n")
        sys.stdout.flush()


def _named(offer: Offer) -> dict[str, Any]:
    return {"event": "offer", **offer.fixed_terms()}


def _identifier(event: str, named: dict[str, Any]) -> str:
    """Return the value of ``--accept`` for a question."""
    return f"{event}:{hashlib.sha256(json.dumps(named, sort_keys=True).encode()).hexdigest()[:32]}"


def _screenful(lines: list[str]) -> list[str]:
    """Return lines that fit, with title and question, on a screen of 80 columns; the last line says what is omitted."""
    if len(lines) <= _MAX_CHANGES and all(len(line) <= _COLUMNS for line in lines):
        return lines
    return [*(plain(line, _COLUMNS) for line in lines[:_MAX_CHANGES]), f"  {_ALL_CHANGES.format(len(lines))}"]


def confirm(question: str, problem: str, remedy: str = "--yes") -> bool:
    """Ask a yes-or-no question.

    Raises:
        GymError: ``USAGE`` without a terminal, with the option to use instead.
    """
    if not (sys.stdin.isatty() and err.is_terminal):
        raise GymError(ErrorCode.USAGE, f"{problem}, and there is no terminal to prompt on", f"pass {remedy}")
    return _answer(question)


def _answer(question: str) -> bool:
    """Prompt for yes or no, after discarding input that was typed before the question was displayed."""
    with suppress(ImportError, OSError, ValueError):
        import termios

        with suppress(termios.error):
            termios.tcflush(sys.stdin.fileno(), termios.TCIFLUSH)
    # No work is running during a prompt, so Ctrl-C or SIGTERM may end the command at once.
    with _handlers_set(signal.default_int_handler):
        return typer.confirm(question, err=True)


def account_table(account: dict[str, Any]) -> TextTable:
    """Create the table of an account and its verdicts, newest first."""
    who = f"{account['name']} ({account['contributor']})"
    title = f"{who} at {account['server']}: {counted(account['balance'], 'credit')}, {account['status']}"
    if account["paused"]:
        title += f"; {plain(account['paused'], MAX_TERM)}"
    table = TextTable("round", "update", "bytes", "verdict", "credit", "reason", title=title)
    for verdict in account["verdicts"]:
        table.add_row(
            str(verdict["server_round"]),
            verdict["update"][:12],
            readable_bytes(verdict["bytes"]),
            verdict["verdict"],
            str(verdict["credit"]),
            verdict["reason"],
        )
    return table


def traffic_line(account: dict[str, Any]) -> str:
    """Describe the traffic between this home and the hub so far, and that of the next round."""
    line = (
        f"{readable_bytes(account['bytes_down'])} down and {readable_bytes(account['bytes_up'])} up by this home; "
        f"each further round downloads about {readable_bytes(account['round_download_bytes'])}"
    )
    if sum(verdict["bytes"] for verdict in account["verdicts"]) > account["bytes_up"]:
        line += "; transfers by other machines are not counted"
    seeded = account["seeding"]
    if seeded["received"] or seeded["served"]:
        line += (
            f"; seeding: {readable_bytes(seeded['received'])} from other contributors, "
            f"{readable_bytes(seeded['served'])} to them ({readable_bytes(seeded['served_on_day'])} today)"
        )
    return line


def privacy_table(rows: list[dict[str, Any]]) -> TextTable:
    """Create the table of privacy spending by dataset and hub."""
    table = TextTable("data", "hub", "updates", "steps", "epsilon", "delta")
    for row in rows:
        for server, there in row["hubs"].items():
            cost = f"{there['epsilon']:.3f}"
            table.add_row(row["data"][:12], server, str(there["updates"]), str(there["steps"]), cost, "")
        table.add_row(
            row["data"][:12], "all together", "", "", f"{row['epsilon']:.3f}", f"{row['target_delta']:g}"
        )
    return table


@contextmanager
def signals_set(stop: threading.Event) -> Iterator[None]:
    """Request a stop at the next checkpoint on the first SIGINT or SIGTERM; interrupt on the second."""

    def request_stop(number: int, frame: FrameType | None) -> None:
        if stop.is_set():
            raise KeyboardInterrupt
        stop.set()

    with _handlers_set(request_stop):
        yield


@contextmanager
def _handlers_set(handler: Callable[[int, FrameType | None], object]) -> Iterator[None]:
    """Handle SIGINT and SIGTERM inside the block if it runs in the main thread."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, handler) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, previous in before.items():
            signal.signal(number, previous)
