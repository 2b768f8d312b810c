"""`gym chat` without a terminal: messages, commands, what is remembered and what is printed; the model is a rule."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest

from gym_fed.cli.chat.settings import ChatSettings
from gym_fed.cli.chat.terminal import Terminal
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.serving.chat.session import ChatSession
from tests.support.chat_writer import RuleWriter


def talk(
    lines: str, monkeypatch: pytest.MonkeyPatch, writer: RuleWriter | None = None, **options: object
) -> ChatSession:
    """A session with these lines on standard input."""
    monkeypatch.setattr("sys.stdin", io.StringIO(lines))
    settings = ChatSettings.of({}).over({})
    given = writer or RuleWriter()
    conversation = ChatSession(given, sampling=settings.fields(), system=options.get("system"))  # type: ignore[arg-type]
    Terminal(conversation, settings, as_json=bool(options.get("as_json"))).run()
    return conversation


def test_answers_stream_and_are_remembered_until_reset() -> None:
    conversation = ChatSession(writer := RuleWriter(), system="be loud")
    assert list(conversation.say("hey")) == ["H", "E", "Y"]
    list(conversation.say("you"))
    assert [m["content"] for m in writer.asked[-1]["messages"]] == ["be loud", "hey", "HEY", "you"]
    conversation.reset()
    list(conversation.say("new"))
    assert [m["content"] for m in writer.asked[-1]["messages"]] == ["be loud", "new"]


def test_the_oldest_turns_go_when_the_context_is_full_but_stay_in_the_history() -> None:
    conversation = ChatSession(writer := RuleWriter(context=20), system="12345")
    for text in ("aaaa", "bbbb", "cccc"):
        list(conversation.say(text))
    sent = [m["content"] for m in writer.asked[-1]["messages"]]
    assert sent == ["12345", "bbbb", "BBBB", "cccc"]
    assert conversation.forgotten == 2
    assert [m["content"] for m in conversation.messages][:2] == ["aaaa", "AAAA"]
    with pytest.raises(GymError) as caught:
        list(conversation.say("x" * 30))
    assert caught.value.code is ErrorCode.TOO_LARGE
    assert len(conversation.messages) == 6  # what was refused was not said


def test_an_answer_that_is_broken_off_is_kept_as_far_as_it_came() -> None:
    conversation = ChatSession(writer := RuleWriter())
    pieces = conversation.say("hello")
    assert next(pieces) + next(pieces) == "HE"
    pieces.close()
    assert writer.closed == 1
    assert conversation.messages[-1] == {"role": "assistant", "content": "HE"}
    assert conversation.finish_reason == "stopped"


def test_a_variant_is_switched_without_losing_what_was_said() -> None:
    conversation = ChatSession(writer := RuleWriter(), variant="ada")
    list(conversation.say("one"))
    conversation.switch("ben")
    list(conversation.say("two"))
    conversation.switch(None)
    list(conversation.say("three"))
    assert [body["model"] for body in writer.asked] == ["rule:ada", "rule:ben", "rule"]
    assert len(writer.asked[-1]["messages"]) == 5
    with pytest.raises(GymError, match="no variant 'eve'") as caught:
        conversation.switch("eve")
    assert caught.value.code is ErrorCode.NOT_FOUND


def test_a_model_without_template_continues_each_text_and_refuses_what_needs_memory() -> None:
    writer = RuleWriter(remembers=False)
    conversation = ChatSession(writer)
    assert "".join(conversation.say("once")) == "ONCE"
    assert (writer.asked[0]["url"], writer.asked[0]["prompt"]) == ("/v1/completions", "once")
    assert conversation.messages == []
    with pytest.raises(GymError, match="has none"):
        ChatSession(writer, system="be loud")


def test_a_pipe_gets_plain_answers_and_long_messages(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    conversation = talk('one\\\ntwo\n\n"""\nthree\n\nfour\n"""\n//slash\n"""five"""', monkeypatch)
    asked = [m["content"] for m in conversation.messages if m["role"] == "user"]
    assert asked == ["one\ntwo", "three\n\nfour", "/slash", "five"]
    shown = capsys.readouterr()
    assert shown.out == "ONE\nTWO\nTHREE\n\nFOUR\n/SLASH\nFIVE\n"
    assert shown.err == ""


def test_json_is_one_line_an_answer(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    talk("hey\n/set max_tokens=2\nyou\n", monkeypatch, as_json=True)
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(line["answer"], line["finish_reason"]) for line in lines] == [("HEY", "stop"), ("YO", "length")]


def test_commands_change_what_is_asked_next(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    writer = RuleWriter()
    conversation = talk(
        "/variant ada\n/system be loud\n/set temperature=0.7 stop=END top_k=none\nhey\n"
        "/variant none\n/system none\n/set temperature=none\nyou\n/undo\n/retry\n/history\n/exit\nnever\n",
        monkeypatch,
        writer,
    )
    first, second, again = writer.asked
    assert (first["model"], first["messages"][0]["content"]) == ("rule:ada", "be loud")
    assert (first["temperature"], first["stop"], "top_k" in first) == (0.7, ["END"], False)
    assert second["model"] == "rule"
    assert "temperature" not in second
    assert [m["content"] for m in second["messages"]] == ["hey", "HEY", "you"]
    assert [m["content"] for m in again["messages"]] == ["hey"]  # sent again, after the second was removed
    assert conversation.messages == [
        {"role": "user", "content": "hey"},
        {"role": "assistant", "content": "HEY"},
    ]
    shown = capsys.readouterr()
    assert shown.out == "HEY\nYOU\nHEY\nuser: hey\nassistant: HEY\n"
    assert "removed: you" in shown.err


def test_a_setting_that_is_not_there_is_refused_with_those_that_are() -> None:
    with pytest.raises(GymError, match="unknown setting 'top_n'") as caught:
        ChatSettings.of({}).changed("top_n=3")
    assert "top_p" in caught.value.hint


def test_variants_and_help_are_listed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    talk("/variant ben\n/variant\n/help\n/system\n/set\n", monkeypatch)
    shown = capsys.readouterr().err
    assert "  none (only the base)\n  ada\n* ben" in shown
    for name in ("/retry", "/undo", "/save", "/load", "/exit", "no system message", "temperature=0.0"):
        assert name in shown


def test_forgetting_and_cutting_off_are_reported(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    talk("aaaa\nbbbb\ncccc\neeee\n/retry\n/set max_tokens=1\ndd\n", monkeypatch, RuleWriter(context=20))
    shown = capsys.readouterr().err
    for number in (2, 4):
        assert shown.count(f"the model no longer sees the first {number} messages") == 1
    assert "same answer; for different answers: /set temperature" in shown
    assert "max_tokens is 1" in shown


def test_a_conversation_is_saved_and_goes_on_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "talk.json"
    talk(f"hey\n/save {file}\n", monkeypatch, system="be loud")
    assert file.stat().st_mode & 0o077 == 0
    writer = RuleWriter()
    talk(f"/load {file}\nyou\n", monkeypatch, writer)
    assert [m["content"] for m in writer.asked[0]["messages"]] == ["be loud", "hey", "HEY", "you"]


def test_a_file_that_is_none_of_the_conversations_own_is_not_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "ada.key").write_text("secret")
    conversation = ChatSession(RuleWriter())
    with pytest.raises(GymError, match="there are no messages"):
        conversation.save(tmp_path / "talk.json")
    list(conversation.say("hey"))
    with pytest.raises(GymError, match=r"ada\.key already exists") as caught:
        conversation.save(tmp_path / "ada.key")
    assert caught.value.code is ErrorCode.FILE_EXISTS
    assert (tmp_path / "ada.key").read_text() == "secret"
    with pytest.raises(GymError, match="no folder"):
        conversation.save(tmp_path / "new" / "talk.json")
    assert not (tmp_path / "new").exists()
    file = tmp_path / "talk.json"
    talk(f"hey\n/save {file}\nyou\n/save {file}\n", monkeypatch)
    talk(f"/load {file}\nwe\n/save {file}\n/system be loud\n/history\n", monkeypatch)
    assert len(json.loads(file.read_text())) == 6
    assert "system: be loud\nuser: hey\n" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{}", "not a list"),
        ("[", "not JSON"),
        ('[{"role": "user"}]', "message 1"),
        ('[{"role": "user", "content": "x"}, {"role": "system", "content": "x"}]', "message 2"),
        ('[{"role": "robot", "content": "x"}]', "message 1"),
    ],
)
def test_what_is_no_conversation_is_not_loaded(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "talk.json").write_text(text)
    conversation = ChatSession(RuleWriter())
    list(conversation.say("kept"))
    with pytest.raises(GymError, match=message):
        conversation.load(tmp_path / "talk.json")
    assert len(conversation.messages) == 2


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("/nosuch", "is not a command"),
        ("/set tempo=1", "tempo"),
        ("/set temperature=9", "temperature"),
        ("/set top_p", "name=value"),
        ("/load", "FILE is missing"),
        ("hey\n/save /proc/x.json", "cannot be written"),
        ("/load /nowhere/x.json", "No such file"),
        ("/retry", "there is no question"),
        ("/variant eve", "no variant 'eve'"),
    ],
)
def test_a_command_that_is_off_ends_a_script_with_its_reason(
    line: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(GymError, match=message):
        talk(f"{line}\n", monkeypatch)


def test_a_question_that_fails_again_keeps_its_old_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    writer = RuleWriter()
    conversation = ChatSession(writer)
    list(conversation.say("hey"))
    writer.context = 1
    monkeypatch.setattr("sys.stdin", io.StringIO("/retry\n"))
    with pytest.raises(GymError):
        Terminal(conversation, ChatSettings.of({})).run()
    assert [m["content"] for m in conversation.messages] == ["hey", "HEY"]


def test_an_attachment_goes_with_the_next_message_and_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("cat.png", "miau.wav", "cat.mp4"):
        (tmp_path / name).write_bytes(b"x")
    writer = RuleWriter()
    lines = [f"/attach {tmp_path / name}" for name in ("cat.png", "miau.wav", "cat.mp4")]
    lines += ["what?", "/retry", "and?", "/history", f"/save {tmp_path / 'talk.json'}"]
    conversation = talk("\n".join(lines) + "\n", monkeypatch, writer)
    first, again, second = writer.asked
    parts = first["messages"][-1]["content"]
    assert [part["type"] for part in parts] == ["image_url", "input_audio", "video_url", "text"]
    assert parts[0]["image_url"]["url"] == "data:image/png;base64,eA=="
    assert parts[1]["input_audio"] == {"data": "eA==", "format": "wav"}
    assert again["messages"] == first["messages"]
    assert second["messages"][-1]["content"] == "and?"
    assert "user: [image] [audio] [video] what?" in capsys.readouterr().out
    other = ChatSession(RuleWriter())
    other.load(tmp_path / "talk.json")
    assert other.messages == conversation.messages
    assert conversation.undo() == ("and?", [])
    question, parts = conversation.undo() or ("", [])
    assert (question, len(parts), conversation.attached) == ("what?", 3, [])


@pytest.mark.parametrize(
    ("name", "size", "code"),
    [
        ("a.txt", 1, ErrorCode.USAGE),
        ("missing.png", 0, ErrorCode.FILE_NOT_FOUND),
        ("a.png", 6 * 2**20 + 1, ErrorCode.TOO_LARGE),
    ],
)
def test_a_file_that_cannot_be_attached_is_refused_by_name(
    tmp_path: Path, name: str, size: int, code: ErrorCode
) -> None:
    if size:
        (tmp_path / name).write_bytes(b"x" * size)
    conversation = ChatSession(RuleWriter())
    with pytest.raises(GymError, match=name) as caught:
        conversation.attach(tmp_path / name)
    assert caught.value.code is code
    assert caught.value.hint
    assert not conversation.attached


def test_an_attachment_stays_until_its_question_is_answered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "cat.png").write_bytes(b"x")
    writer = RuleWriter()
    conversation = ChatSession(writer)
    conversation.attach(tmp_path / "cat.png")
    with monkeypatch.context() as patch:
        patch.setattr(writer, "write", _busy)
        with pytest.raises(GymError, match="busy"):
            list(conversation.say("what?"))
    assert len(conversation.attached) == 1
    list(conversation.say("what?"))
    assert conversation.messages[0]["content"][0]["type"] == "image_url"
    assert conversation.attached == []
    conversation.attach(tmp_path / "cat.png")
    terminal = Terminal(conversation, ChatSettings.of({}))
    terminal._retry("")
    assert len(conversation.attached) == 1, "it is for the next question"
    assert len(conversation.messages[0]["content"]) == 2
    terminal._undo("")
    assert len(conversation.attached) == 1
    terminal._attach("none")
    assert conversation.attached == []


def _busy(_url: str, _body: object) -> Any:
    raise GymError(ErrorCode.BUSY, "busy", "try again")
    yield


@pytest.mark.parametrize(
    "content",
    [
        *([], [{"text": "x"}], [{"type": ["a"]}], [{"type": "image_url"}]),
        *([{"type": "text"}], [{"type": "image_url", "image_url": "x"}], [1]),
    ],
)
def test_parts_that_are_not_content_are_not_loaded(tmp_path: Path, content: Any) -> None:
    (tmp_path / "a.json").write_text(json.dumps([{"role": "user", "content": content}]))
    with pytest.raises(GymError, match="message 1 is invalid"):
        ChatSession(RuleWriter()).load(tmp_path / "a.json")


def test_text_is_found_wherever_it_is_among_the_parts_of_a_question(tmp_path: Path) -> None:
    picture = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}
    parts = [{"type": "text", "text": "a"}, picture, {"type": "text", "text": "b"}, picture]
    (tmp_path / "a.json").write_text(json.dumps([{"role": "user", "content": parts}]))
    conversation = ChatSession(RuleWriter())
    conversation.load(tmp_path / "a.json")
    assert conversation.undo() == ("a\nb", [picture, picture])


def test_the_model_s_own_sampling_is_the_default_and_without_one_answers_are_greedy() -> None:
    own = {"temperature": 0.6, "top_p": 0.95, "top_k": -1}
    fields = ChatSettings.of({"temperature": 0.2}).over(own).fields()
    assert (fields["temperature"], fields["top_p"], "top_k" in fields) == (0.2, 0.95, False)
    assert ChatSettings.of({}).over(own).temperature == 0.6
    assert ChatSettings.of({}).over({}).temperature == 0.0
