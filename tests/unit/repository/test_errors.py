"""The error family: codes, statuses, the trip over the wire, and what the terminal shows."""

from __future__ import annotations

import copy
import http
import json
import re
import sys
from pathlib import Path

import grpc
import pytest
import typer

from gym_fed.core import console
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.core.text import without_folders
from gym_fed.trust.wire.errors import to_status
from gym_fed.trust.wire.v1 import hub_pb2 as pb

DOCUMENT = Path(__file__).resolve().parents[3] / "docs" / "errors.md"


@pytest.mark.parametrize("code", ErrorCode)
def test_every_code_has_a_grpc_status_that_exists(code: ErrorCode) -> None:
    assert code.grpc_status in grpc.StatusCode.__members__
    assert code.grpc_status != "OK"


@pytest.mark.parametrize("code", ErrorCode)
def test_every_code_has_an_http_status_of_an_error(code: ErrorCode) -> None:
    assert 400 <= code.http_status < 600
    # 499 is the one status that is no standard: nginx's name for a caller who left.
    assert code.http_status == 499 or http.HTTPStatus(code.http_status)


@pytest.mark.parametrize("code", ErrorCode)
def test_every_code_is_explained_in_one_sentence(code: ErrorCode) -> None:
    assert re.fullmatch(r"[A-Z].{10,}\.", code.help)


def test_exit_codes_are_distinct_and_say_failure() -> None:
    exit_codes = [code.exit_code for code in ErrorCode]
    assert len(set(exit_codes)) == len(exit_codes)
    assert all(0 < code < 126 or code in (130, 143) for code in exit_codes), "the shell has 126 to 255"


@pytest.mark.parametrize("code", ErrorCode)
def test_an_error_survives_the_wire(code: ErrorCode) -> None:
    sent = GymError(code, "delta.gymdelta: bad header", "send it again")
    received = GymError.from_dict(json.loads(json.dumps(sent.to_dict())))
    assert (received.code, received.message, received.hint) == (code, sent.message, sent.hint)
    assert received.exit_code == sent.exit_code


def test_what_an_error_quotes_reaches_the_wire_without_control_characters() -> None:
    _, details, trailer = to_status(GymError(ErrorCode.USAGE, "name \x1b]0;x\x07 \u202e", "\x9b31m"))
    body = pb.Error.FromString(trailer[0][1])
    for text in (details, body.message, body.hint):
        assert not {"\x1b", "\x07", "\u202e", "\x9b"} & set(text)
    assert "\\x1b" in details


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        (
            "the merge failed: /srv/hub/data/heldout.jsonl:3: no answer",
            "the merge failed: heldout.jsonl:3: no answer",
        ),
        ("'~/secret/base' has digest sha256:0", "'base' has digest sha256:0"),
        (r"C:\Users\ada\root.jsonl is missing", "root.jsonl is missing"),
        ("sqlite:////srv/hub/hub.db and file:///srv/hub/x", "hub.db and x"),
        ("https://example.org/a/b and 1/2 and a/b/c stay", "https://example.org/a/b and 1/2 and a/b/c stay"),
    ],
)
def test_published_reasons_name_no_folders_of_this_machine(text: str, shown: str) -> None:
    assert without_folders(text) == shown


def test_a_code_from_a_newer_server_becomes_internal_and_keeps_its_message() -> None:
    error = GymError.from_dict({"code": "not-invented-yet", "message": "no", "hint": "upgrade"})
    assert (error.code, error.message, error.hint) == (ErrorCode.INTERNAL, "no", "upgrade")


@pytest.mark.parametrize("data", [{}, {"code": None, "message": None, "hint": None}, {"code": []}])
def test_an_error_without_its_fields_is_still_an_error(data: dict[str, str]) -> None:
    error = GymError.from_dict(data)
    assert (error.code, error.message, error.hint) == (ErrorCode.INTERNAL, "unknown error", "")


def test_an_error_can_be_copied_between_processes() -> None:
    twin = copy.copy(GymError(ErrorCode.STALE, "round 3 is past", "join round 4"))
    assert (twin.code, twin.message, twin.hint) == (ErrorCode.STALE, "round 3 is past", "join round 4")


def test_an_error_reads_as_message_and_hint() -> None:
    assert str(GymError(ErrorCode.USAGE, "no such round: 9", "see gym-server status")) == (
        "no such round: 9 (see gym-server status)"
    )
    assert str(GymError(ErrorCode.USAGE, "no such round: 9")) == "no such round: 9"


def test_the_document_lists_exactly_the_codes_there_are() -> None:
    rows = [
        [cell.strip(" `") for cell in line.split("|")[1:-1]] for line in DOCUMENT.read_text().splitlines()
    ]
    listed = [tuple(row[:4]) for row in rows if len(row) == 6 and row[1].isdigit()]
    expected = [(c.value, str(c.exit_code), c.grpc_status, str(c.http_status)) for c in ErrorCode]
    assert listed == expected


def failing_app(error: BaseException) -> typer.Typer:
    app = typer.Typer(pretty_exceptions_enable=False)

    @app.command()
    def command(json_: bool = typer.Option(False, "--json")) -> None:
        raise error

    return app


def test_a_command_ends_with_the_code_of_its_error(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["gym"])
    with pytest.raises(SystemExit) as stop:
        console.run_app(failing_app(GymError(ErrorCode.DATA_INVALID, "my.jsonl:3: no text", "add [text]")))
    shown = capsys.readouterr()
    assert stop.value.code == 20
    assert shown.out == ""
    assert "(data-invalid): my.jsonl:3: no text" in shown.err
    assert "add [text]" in shown.err


def test_json_output_carries_the_error(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["gym", "--json"])
    with pytest.raises(SystemExit):
        console.run_app(failing_app(GymError(ErrorCode.STALE, "round 3 is past")))
    said = capsys.readouterr()
    document = json.loads(said.err)
    assert said.out == ""
    assert document == {"error": {"code": "stale", "message": "round 3 is past", "hint": ""}}


def test_a_wrong_option_is_a_usage_error_in_json_too(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["gym", "--json", "--nonsense"])
    with pytest.raises(SystemExit) as stop:
        console.run_app(failing_app(AssertionError("not reached")))
    assert stop.value.code == ErrorCode.USAGE.exit_code
    said = capsys.readouterr()
    document = json.loads(said.err)
    assert said.out == ""
    assert document["error"]["code"] == "usage"
    assert "--nonsense" in document["error"]["message"]


def test_a_wrong_option_reads_like_every_other_error(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["gym", "--nonsense"])
    with pytest.raises(SystemExit) as stop:
        console.run_app(failing_app(AssertionError("not reached")))
    shown = capsys.readouterr()
    assert (stop.value.code, shown.out) == (ErrorCode.USAGE.exit_code, "")
    first, second = shown.err.splitlines()
    assert first == "error (usage): no such option '--nonsense'"
    assert second.startswith("  see ")
    assert second.endswith("--help")


def test_an_option_without_its_value_names_the_command_whose_help_to_read(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    app, group = typer.Typer(), typer.Typer()
    group.command("list")(lambda: None)
    group.command("show")(_show)
    app.add_typer(group, name="ledger")
    monkeypatch.setattr(sys, "argv", ["/usr/bin/gym-server", "ledger", "show", "--limit"])
    with pytest.raises(SystemExit) as stop:
        console.run_app(app)
    assert stop.value.code == ErrorCode.USAGE.exit_code
    assert capsys.readouterr().err.splitlines() == [
        "error (usage): option '--limit' requires an argument",
        "  see gym-server ledger show --help",
    ]


def _show(limit: int = 1) -> None:
    raise AssertionError("not reached")


@pytest.mark.parametrize("interruption", [KeyboardInterrupt(), typer.Abort()])
def test_ctrl_c_ends_with_130(
    interruption: BaseException, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["gym"])
    with pytest.raises(SystemExit) as stop:
        console.run_app(failing_app(interruption))
    assert stop.value.code == 130
    assert "interrupted" in capsys.readouterr().err


def test_a_message_from_elsewhere_cannot_drive_the_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["gym"])
    with pytest.raises(SystemExit):
        console.fail(GymError(ErrorCode.INTERNAL, "\x1b]0;owned\x07 [bold]x[/bold] é", "\x1b[2J"))
    shown = capsys.readouterr().err
    assert "\x1b]0" not in shown
    assert "\x1b[2J" not in shown
    assert "\\x1b]0;owned\\x07 [bold]x[/bold] é" in shown


def test_an_unexpected_exception_is_not_dressed_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["gym"])
    with pytest.raises(ZeroDivisionError):
        console.run_app(failing_app(ZeroDivisionError("a defect")))


def test_a_place_between_colons_is_no_emoji(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["gym"])
    with pytest.raises(SystemExit):
        console.run_app(failing_app(GymError(ErrorCode.DATA_INVALID, "my.jsonl:100: 'output' is empty")))
    assert "my.jsonl:100: 'output' is empty" in capsys.readouterr().err


def test_places_are_printed_as_they_are(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        console.fail(GymError(ErrorCode.DATA_INVALID, "rows.jsonl:100: 'output' is empty", "see :abc: there"))
    printed = capsys.readouterr().err
    assert "rows.jsonl:100: 'output'" in printed
    assert ":abc:" in printed
