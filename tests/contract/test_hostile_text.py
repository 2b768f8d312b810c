"""Whatever text a stranger sends: no call fails inside the hub, and nothing of it drives a terminal or a log."""

from __future__ import annotations

import io
import json
import logging
from collections.abc import Iterator
from dataclasses import MISSING, fields
from itertools import count
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message_factory import GetMessageClass
from gym_client.hub.transport import HubClient
from gym_server.cli.accounts import accounts_of, accounts_table, variants_table
from gym_server.cli.show import (
    ledger_lines,
    rewards_shown,
    rewards_table,
    rounds_tables,
    status_of,
    status_table,
)
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gym_fed.core.console import TextConsole
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.core.logs import LogLine
from gym_fed.core.text import MAX_TEXT, harmless, is_name, is_visible, plain, whole_number
from gym_fed.trust.wire.errors import from_rpc_error
from gym_fed.trust.wire.limits import SESSION_KEY
from gym_fed.trust.wire.v1 import hub_pb2 as pb
from tests.support.loopback_hub import LoopbackHub

NASTY = (
    "[/x]",
    "[bold red]x",
    "[link=http://x]y[/link]",
    "\x1b]0;owned\x07",
    "\x1b[2J\x1b[H",
    "a\u202eb",
    "x\u200by",
    "\u0085",
    "round 1 committed\n2026-01-01 INFO forged",
    "9" * 6000,
    "\u0664\u0665",
    "{" * 3000,
    "[" * 3000,
    '{"a":' + "9" * 6000 + "}",
    '"\\ud800"',
    "NaN",
    "1e999",
    "\x00",
    "c" + "0" * 32 + "." + "9" * 6000 + ".1.00",
    "../../etc/passwd",
)
TEXTS = st.one_of(
    st.sampled_from(NASTY),
    st.text(st.characters(exclude_categories=["Cs"]), max_size=60),
    st.text(st.sampled_from('\x00\x07\x1b\x9b\u202e\u200b[]/{}":9\n'), max_size=40),
)
SETTINGS = settings(max_examples=60, derandomize=True, suppress_health_check=list(HealthCheck))
METHODS = {method.name: method for method in pb.DESCRIPTOR.services_by_name["Hub"].methods}


class Log(logging.Handler):
    """What a hub's log would say, in the form in which it says it."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.setFormatter(LogLine("%(asctime)s %(levelname)s %(message)s"))
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(self.format(record))

    def assert_harmless(self) -> None:
        for line in self.lines:
            assert "Traceback" not in line, line
            assert_harmless(line)
            assert "\n" not in line


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LoopbackHub]:
    hub = LoopbackHub(tmp_path_factory.mktemp("hostile") / "hub", limits=GENEROUS)
    yield hub
    hub.close()


GENEROUS = {
    "calls_per_second": 1e6,
    "calls_per_second_of_account": 1e6,
    "calls_per_account": 10_000,
    "calls_per_address": 10_000,
    "enrolments_per_minute": 1e6,
    "enrolment_work_bits": 0,
}


@pytest.fixture(scope="module")
def stranger(hub: LoopbackHub, tmp_path_factory: pytest.TempPathFactory) -> Iterator[HubClient]:
    with hub.client(tmp_path_factory.mktemp("stranger") / "home", "stranger") as client:
        yield client


@pytest.fixture
def log() -> Iterator[Log]:
    handler, loggers = Log(), [logging.getLogger(name) for name in ("gym_server", "grpc", "asyncio")]
    before = [logger.level for logger in loggers]
    for logger in loggers:
        logger.addHandler(handler)
        logger.setLevel(logging.INFO)
    yield handler
    for logger, level in zip(loggers, before, strict=True):
        logger.removeHandler(handler)
        logger.setLevel(level)


@pytest.mark.parametrize("method", sorted(METHODS))
def test_no_text_in_a_request_fails_the_hub_or_drives_its_log(
    method: str, hub: LoopbackHub, stranger: HubClient, log: Log
) -> None:
    @SETTINGS
    @given(st.data())
    def attack(data: st.DataObject) -> None:
        request = data.draw(_messages(METHODS[method].input_type))
        stranger.authenticate()  # an earlier example may have ended the session
        _refused_or_answered(stranger, method, request)

    attack()
    if method == "Leave":
        stranger.enrol("stranger")
    log.assert_harmless()


@SETTINGS
@given(
    token=st.one_of(TEXTS, st.builds(lambda n: f"c{'0' * 32}.{'9' * n}.{'9' * n}.00", st.integers(1, 7000)))
)
def test_no_session_token_fails_the_hub(hub: LoopbackHub, stranger: HubClient, token: str) -> None:
    ascii_token = "".join(c for c in token if " " <= c <= "~")
    contributor = stranger.pin.contributor
    for token in (ascii_token, f"{contributor}.{'9' * 6000}.1.00", f"{contributor}.{ascii_token}"):
        assert _code(stranger, "Account", pb.AccountRequest(), token) in (
            ErrorCode.UNAUTHENTICATED,
            None,
        )


def test_a_reply_to_a_task_may_say_anything(hub: LoopbackHub, stranger: HubClient, log: Log) -> None:
    stranger.authenticate()
    numbers = count()

    @SETTINGS
    @given(st.data())
    def attack(data: st.DataObject) -> None:
        # The hub's own words, and each time others, or the same task would be found instead of a new one.
        content = pb.Records(order=[str(next(numbers))]).SerializeToString()
        hub.fed.queue.close_group("1")
        message = hub.fed.queue.push(stranger.node_id, "1", "train", 1e10, 1e10, content)
        hub.fed.queue.lease(stranger.node_id)
        request = data.draw(_messages(pb.SubmitRequest.DESCRIPTOR))
        request.message_id = message
        _refused_or_answered(stranger, "Submit", request)
        beat = data.draw(_messages(pb.HeartbeatRequest.DESCRIPTOR))
        beat.message_id = message
        _refused_or_answered(stranger, "Heartbeat", beat)

    attack()
    log.assert_harmless()


@pytest.mark.parametrize(
    "name",
    [
        *("a\x1b[2Jb", "a\u202eb", "a\u200bb", "\u3164", "a\nb", "", " ", "x" * 81, "\u0301a", "a\ufe0f"),
        "a" + "\u0301" * 5,  # marks that cover the lines above
    ],
)
def test_a_name_that_is_not_what_it_seems_is_refused(hub: LoopbackHub, tmp_path: Path, name: str) -> None:
    with pytest.raises(GymError) as caught:
        hub.client(tmp_path / "home", name or " ")
    assert caught.value.code is ErrorCode.USAGE
    assert_harmless(str(caught.value))


@pytest.mark.parametrize("name", ["[/x]", "Zoë Ünal", "e\u0302\u0303", "李雷", "a [bold]b", "😀"])
def test_what_can_be_read_is_a_name_and_every_command_shows_it(
    hub: LoopbackHub, tmp_path: Path, name: str
) -> None:
    hub.client(tmp_path / "home", name).close()
    fed = hub.fed
    for shown in (
        status_table(status_of(fed.state, fed.config, fed.steering, fed.payouts, fed.fingerprint)),
        accounts_table(accounts_of(fed)),
        rewards_table(rewards_shown(fed.config, fed.database, fed.payouts)),
    ):
        assert name in rendered(shown)
    assert any(name in ledger_lines(entry.to_dict())[0] for entry in fed.ledger.entries())


@SETTINGS
@given(text=TEXTS)
def test_the_hubs_commands_show_whatever_is_in_the_database(text: str) -> None:
    update = {
        "name": text,
        "verdict": text,
        "bytes": 1,
        "norm": None,
        "score": None,
        "credit": 0,
        "reason": text,
    }
    line = {
        "server_round": 1,
        "state": text,
        "version": None,
        "heldout_before": None,
        "verdicts": {text: 1},
        "tasks": 2,
        "working": 1,
        "merge": {"phase": text, "done": 1, "total": 2},
        "reason": text,
        "updates": [update],
        "set_aside": [update],
    }
    contributor = {"contributor": text, "name": text, "status": text, "connected": True, "balance": 1}
    status = {
        "name": text,
        "version": 0,
        "base_model": text,
        "server_round": 1,
        "round_state": text,
        "num_rounds": 1,
        "committed": 1,
        "merge": {"phase": text, "done": 0, "total": 0},
        "privacy": None,
        "paused": {"until": 0.0, "failures": 5, "reason": text},
        "pause": {"since": 0, "why": text},
        "evaluation": {"tasks": {text: {"before": 0.5, "after": 0.4}}, "server_round": 1, "outcome": text},
        "contributors": [contributor],
    }
    key = {"public_key": text, "from": None, "until": None, "status": text}
    variant = {
        **dict.fromkeys(("owner", "variant", "base", "key_status"), text),
        "revision": 1,
        "size_bytes": 1,
        "readers": [text],
    }
    for shown in (
        *rounds_tables([line]),
        status_table(status),
        accounts_table([{**contributor, "keys": [key]}]),
        variants_table([variant]),
    ):
        assert_harmless(rendered(shown))
    assert_harmless(ledger_lines({"sequence": 1, "hash": text, "kind": text, "body": {"a": text}})[0])


@SETTINGS
@given(text=TEXTS)
def test_a_hubs_text_neither_breaks_nor_drives_a_contributors_terminal(text: str) -> None:
    from gym_client.cli.terminal import account_table
    from gym_client.cli.terms_in_words import offer_panel
    from gym_client.display import make_display
    from gym_client.ledger.rewards import rewards_table as own_rewards

    verdict = {"server_round": 1, "update": text, "bytes": 1, "verdict": text, "credit": 0, "reason": text}
    account = {"name": text, "contributor": text, "server": text, "balance": 1, "status": text}
    account["paused"] = text
    rewards = {"contributor": text, "server": text, "balance": 1}
    round_row = {**verdict, "score": None, "reputation": None, "receipts": [text]}
    for shown in (
        account_table({**account, "verdicts": [verdict]}),
        own_rewards({**rewards, "rounds": [round_row]}),
    ):
        assert_harmless(rendered(shown))
    assert_harmless(rendered(offer_panel(_offer(text))))
    for terminal in (True, False):
        console, written = _console(terminal)
        display = make_display(console, as_json=False)
        display.report("finished", f"the server says: {text}")
        display.close()
        console.print(text)
        console.print(f"{text}: hint", style="dim")
        assert_harmless(written.getvalue())


@given(text=st.text())
def test_plain_text_is_one_bounded_visible_line(text: str) -> None:
    shown = plain(text)
    assert len(shown) <= MAX_TEXT
    assert all(map(is_visible, shown))
    assert plain(shown) == shown
    assert harmless(harmless(text)) == harmless(text)
    assert not is_name(text, 80) or plain(text) == text


def test_only_short_ascii_digits_are_a_number() -> None:
    assert whole_number("007") == 7
    for text in ("", "-1", "9" * 6000, "\u0664", "1 ", "1_0", "\u00b2"):
        assert whole_number(text) is None


def assert_harmless(text: str) -> None:
    found = {
        c for c in text if c != "\n" and (ord(c) < 32 or 0x7F <= ord(c) < 0xA0 or c in "\u202e\u200e\u2028")
    }
    assert not found, (found, text)


def rendered(shown: Any) -> str:
    """What a terminal of 100 columns without colours gets."""
    console, written = _console(terminal=True)
    console.print(shown)
    return written.getvalue()


def _console(terminal: bool) -> tuple[TextConsole, io.StringIO]:
    console, written = TextConsole(), io.StringIO()
    console.file, console.width, console.no_color = written, 100, True
    console._force_terminal, console._color_system = terminal, None
    return console, written


def _offer(text: str) -> Any:
    from gym_client.cli.offer import Offer
    from gym_client.privacy.terms import PrivacyTerms

    from gym_fed.config.delta import CodecPolicy
    from gym_fed.config.hub.task import TrainingRecipe

    recipe, codec = TrainingRecipe().model_dump(mode="json"), CodecPolicy().model_dump(mode="json")
    required = [field for field in fields(Offer) if field.default is MISSING]
    values: dict[str, Any] = {field.name: 1 if field.type == "int" else text for field in required}
    values |= {
        "recipe": {**recipe, "algorithm": text},
        "codec": codec,
        "privacy": PrivacyTerms(None, None, 0.0, None, None, 1, None, None),
    }
    return Offer(**values)


def _refused_or_answered(client: HubClient, method: str, request: Any) -> None:
    code = _code(client, method, request, client._session)
    assert code is not ErrorCode.INTERNAL


def _code(client: HubClient, method: str, request: Any, token: str) -> ErrorCode | None:
    """What a call is refused with; None when it was answered."""
    stub, described = getattr(client._stub, method), METHODS[method]
    try:
        answer = stub(
            iter([request]) if described.client_streaming else request,
            timeout=0.3 if method == "Work" else 30,
            metadata=[(SESSION_KEY, token)],
        )
        if described.server_streaming:
            for _ in answer:
                pass
    except grpc.RpcError as error:
        if method == "Work" and error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
            return None
        refused = from_rpc_error(error, "hub")
        assert_harmless(json.dumps(refused.to_dict()))
        if refused.code is ErrorCode.INTERNAL:
            raise AssertionError(f"{method} of {str(request)[:500]}: {refused}") from error
        return refused.code
    return None


def _messages(kind: Descriptor) -> st.SearchStrategy[Any]:
    """Messages of a type with hostile text in every string field, however deep."""

    @st.composite
    def build(draw: st.DrawFn) -> Any:
        message = GetMessageClass(kind)()
        chosen = {oneof.name: draw(st.sampled_from(list(oneof.fields))).name for oneof in kind.oneofs}
        for field in kind.fields:
            oneof = field.containing_oneof
            if oneof is not None and chosen[oneof.name] != field.name:
                continue
            _fill(draw, message, field)
        return message

    return build()


def _fill(draw: st.DrawFn, message: Any, field: FieldDescriptor) -> None:
    values = getattr(message, field.name)
    if field.message_type is not None and field.message_type.GetOptions().map_entry:
        key = draw(st.sampled_from(["update", "delta", "task"]) | TEXTS)
        values[key].CopyFrom(draw(_messages(field.message_type.fields_by_name["value"].message_type)))
    elif field.message_type is not None:
        for _ in range(draw(st.integers(0, 2)) if field.is_repeated else 1):
            drawn = draw(_messages(field.message_type))
            (values.add() if field.is_repeated else values).CopyFrom(drawn)
    elif field.is_repeated:
        values.extend(draw(st.lists(_scalars(field), max_size=3)))
    else:
        setattr(message, field.name, draw(_scalars(field)))


def _scalars(field: FieldDescriptor) -> st.SearchStrategy[Any]:
    if field.name == "key":
        return st.sampled_from(["manifest", "signature", "public_key"]) | TEXTS
    return {
        FieldDescriptor.CPPTYPE_STRING: (
            st.binary(max_size=64) if field.type == FieldDescriptor.TYPE_BYTES else TEXTS
        ),
        FieldDescriptor.CPPTYPE_BOOL: st.booleans(),
        FieldDescriptor.CPPTYPE_DOUBLE: st.floats(),
        FieldDescriptor.CPPTYPE_UINT32: st.sampled_from([0, 1, 2**32 - 1]),
        FieldDescriptor.CPPTYPE_UINT64: st.sampled_from([0, 1, 2**63, 2**64 - 1]),
        FieldDescriptor.CPPTYPE_INT64: st.sampled_from([0, 1, -1, 2**63 - 1, -(2**63)]),
    }[field.cpp_type]
