"""`gym-server init`: its questions at a terminal, flags in their place, and what it prints to run next."""

from __future__ import annotations

import json
import os
import pty
import subprocess
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import Result
from gym_server.accounts.invitations import install_lines, needs_wheel
from gym_server.cli import questions
from gym_server.cli.main import app
from gym_server.cli.setup import HubChoices
from gym_server.federation import read_config
from typer.testing import CliRunner

from gym_fed.cli.main import app as gym
from gym_fed.config.hub.sections import DashboardConfig
from gym_fed.config.hub.server import ServerConfig
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.privacy.accountant import NoiseEvent, epsilon
from gym_fed.trust.identity.login import find_invite
from tests.support.hub import BIN
from tests.support.wait import SECONDS

ENTER = "\n"


def init(folder: Path, *arguments: str, typed: str | None = None) -> Result:
    return CliRunner().invoke(app, ["init", "--dir", str(folder), *arguments], input=typed)


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(questions, "_is_terminal", lambda: True)


@pytest.mark.usefixtures("terminal")
def test_enter_nine_times_makes_the_hub_that_no_questions_make(tmp_path: Path) -> None:
    asked = init(tmp_path / "asked", typed=9 * ENTER)
    assert asked.exit_code == 0, asked.output
    assert "9/9" in asked.output
    assert init(tmp_path / "yes", "--yes").exit_code == 0
    assert read_config(tmp_path / "asked") == read_config(tmp_path / "yes")
    assert read_config(tmp_path / "yes").rewards.score == "participation"


@pytest.mark.usefixtures("terminal")
def test_every_question_and_its_explanation_fits_80_columns(tmp_path: Path) -> None:
    asked = init(tmp_path / "hub", typed=9 * ENTER).output
    shown, _, _ = asked.partition("A hub in")
    assert [line for line in shown.splitlines() if len(line) > 80] == []
    for number, question in enumerate(questions._QUESTIONS.values(), start=1):
        assert f"{number}/9  {question.why}" in shown


@pytest.mark.usefixtures("terminal")
def test_three_friends_begin_without_an_editor(tmp_path: Path) -> None:
    for name in ("heldout", "root"):
        (tmp_path / f"{name}.jsonl").write_text(json.dumps({"text": "what everybody should know"}) + "\n")
    answers = [
        "gym-nano",
        "three friends",
        "invite",
        "hub.example.org",
        str(tmp_path / "heldout.jsonl"),
        str(tmp_path / "root.jsonl"),
        "5",
        "2",
        "none",
    ]
    done = init(tmp_path / "hub", typed="\n".join(answers) + "\n")
    assert done.exit_code == 0, done.output
    config = read_config(tmp_path / "hub")
    assert (config.name, config.enrolment.policy) == ("three friends", "invite")
    assert (config.listen, config.advertise) == ("0.0.0.0:9443", "hub.example.org:9443")
    assert config.gate.heldout == str(tmp_path / "heldout.jsonl")
    assert config.root is not None
    assert config.root.data == str(tmp_path / "root.jsonl")
    assert config.soup.aggregator == "byzantine_evidence"
    assert config.rewards.score == "estimate", "noise must not be paid like work where it can be measured"
    assert (config.rounds.num_rounds, config.rounds.min_contributors) == (5, 2)
    assert config.soup.num_malicious_nodes == 0
    assert "soup.num_malicious_nodes is 0" in done.output
    assert f"gym-server run --dir {tmp_path / 'hub'}" in done.output
    assert f"gym-server invites create --dir {tmp_path / 'hub'}" in done.output
    assert "gym-client join --invite INVITE --data FILE" in done.output


@pytest.mark.usefixtures("terminal")
def test_what_the_config_would_refuse_is_asked_again_with_the_reason(tmp_path: Path) -> None:
    answers = ["no/such/model", "", "x" * 81, "", "friends", "open", "0.0.0.0:9443", "hub:99999", ""]
    answers += [
        "absent.jsonl",
        "task:nothing",
        "",
        "none",
        "ten",
        "0",
        "",
        "none",
        "3",
        "-1",
        "eight",
        "none",
    ]
    done = init(tmp_path / "hub", typed="\n".join(answers) + "\n")
    assert done.exit_code == 0, done.output
    for reason in (
        "no such folder",
        "at most 80 characters",
        "'open', 'invite' or 'allow-list'",
        "nobody can connect to 0.0.0.0:9443",
        "port 99999 is not between 1 and 65535",
        "absent.jsonl",
        "nothing",
        "rounds.num_rounds",
        "rounds.min_contributors",
        "greater than 0",
        "valid number",
    ):
        assert reason in done.output, reason
    assert read_config(tmp_path / "hub").enrolment.policy == "open"
    assert read_config(tmp_path / "hub").soup.num_malicious_nodes == 1


@pytest.mark.usefixtures("terminal")
def test_heldout_rows_of_other_columns_are_refused_with_the_command_that_rewrites_them(
    tmp_path: Path,
) -> None:
    rows = tmp_path / "asked.jsonl"
    rows.write_text(json.dumps({"question": "1+1", "answer": "2"}) + "\n")
    asked = init(tmp_path / "hub", typed=4 * ENTER + f"{rows}\n" + 5 * ENTER).output
    assert f"gym data convert {rows} heldout.jsonl --to completion" in asked
    written = tmp_path / "heldout.jsonl"
    columns = "prompt=question,completion=answer"
    words = ["data", "convert", str(rows), str(written), "--to", "completion", "--columns", columns]
    assert CliRunner().invoke(gym, words).exit_code == 0
    assert init(tmp_path / "other", "--heldout", str(written)).exit_code == 0


def test_a_base_that_is_not_on_this_machine_is_named_at_the_end(tmp_path: Path) -> None:
    done = init(tmp_path / "hub", "--base", "acme/absent")
    assert done.exit_code == 0, done.output
    assert "the hub cannot run yet: no model called 'acme/absent' on this machine" in done.output
    assert "cannot run yet" not in init(tmp_path / "other", "--yes").output


@pytest.mark.usefixtures("terminal")
@pytest.mark.parametrize("arguments", [("--num-rounds", "3"), ("--yes",), ("--json",)])
def test_nothing_is_asked_beside_a_flag(tmp_path: Path, arguments: tuple[str, ...]) -> None:
    done = init(tmp_path / "hub", *arguments)
    assert done.exit_code == 0, done.output
    assert "1/9" not in done.output
    assert read_config(tmp_path / "hub").rounds.num_rounds == (3 if "3" in arguments else 10)


@pytest.mark.usefixtures("terminal")
def test_an_end_of_input_makes_nothing(tmp_path: Path) -> None:
    assert init(tmp_path / "hub", typed=2 * ENTER).exit_code != 0
    assert not (tmp_path / "hub").exists()


@pytest.mark.usefixtures("terminal")
def test_a_folder_with_a_hub_is_refused_before_the_first_question(tmp_path: Path) -> None:
    assert init(tmp_path / "hub", "--yes").exit_code == 0
    done = init(tmp_path / "hub", typed=9 * ENTER)
    assert done.exit_code != 0
    assert "1/9" not in done.output


@pytest.mark.parametrize(
    ("address", "listen", "advertise"),
    [
        ("127.0.0.1:7000", "127.0.0.1:7000", None),
        ("localhost:7000", "localhost:7000", None),
        ("[::1]:7000", "[::1]:7000", None),
        ("hub.example.org:7000", "0.0.0.0:7000", "hub.example.org:7000"),
        ("hub.example.org:443", "0.0.0.0:9443", "hub.example.org:443"),
        ("[2001:db8::1]:9443", "[::]:9443", "[2001:db8::1]:9443"),
        ("192.168.1.5", "0.0.0.0:9443", "192.168.1.5:9443"),
    ],
)
def test_an_address_for_others_opens_the_hub_to_them(
    tmp_path: Path, address: str, listen: str, advertise: str | None
) -> None:
    assert init(tmp_path / "hub", "--address", address).exit_code == 0
    config = read_config(tmp_path / "hub")
    assert (config.listen, config.advertise) == (listen, advertise)


@pytest.mark.parametrize("quorum", range(1, 9))
def test_the_rule_can_always_be_satisfied_by_the_quorum(quorum: int) -> None:
    text = HubChoices(min_contributors=quorum).config_text()
    config = ServerConfig.model_validate(yaml.safe_load(text))
    assert (config.soup.num_malicious_nodes > 0) is (quorum >= 3)


@pytest.mark.parametrize(("rows", "rule", "malicious"), [(False, "mean", 0), (True, "root_gate", 1)])
def test_a_privacy_budget_writes_all_that_it_needs_and_says_which_rule_it_became(
    tmp_path: Path, rows: bool, rule: str, malicious: int
) -> None:
    clean = tmp_path / "root.jsonl"
    clean.write_text(json.dumps({"text": "what everybody should know"}) + "\n")
    done = init(tmp_path / "hub", "--epsilon", "8", *(["--root-data", str(clean)] if rows else []))
    assert done.exit_code == 0, done.output
    config = read_config(tmp_path / "hub")
    assert (config.soup.aggregator, config.soup.num_malicious_nodes) == (rule, malicious)
    assert config.privacy is not None
    assert config.privacy.epsilon == 8
    event = NoiseEvent(noise_multiplier=config.privacy.noise_multiplier, count=config.rounds.num_rounds)
    assert 7.9 < epsilon([event], config.privacy.target_delta) <= 8
    said = " ".join(done.output.split())
    assert f"privacy: the rule is {rule}; noise_multiplier 1.8989 gives epsilon 8 for 10 rounds" in said
    assert ("the rule is root_gate, which withstands more" in said) is not rows
    assert "a base of 2.41M weights the noise is 983 times as long as the longest update" in said
    assert "nobody can be outvoted" not in said


def test_a_privacy_budget_freezes_a_factor_of_a_large_bases_lora() -> None:
    recipe = yaml.safe_load(HubChoices(base_model="nobody/absent", epsilon=8.0).config_text())["recipe"]
    assert (recipe["finetuning"], recipe["lora"]) == ("lora", {"freeze_a": True})


@pytest.mark.parametrize(
    ("flag", "value"),
    [
        ("--heldout", "absent.jsonl"),
        ("--root-data", "absent.jsonl"),
        ("--address", "a b"),
        ("--min-contributors", "0"),
        ("--enrolment", "closed"),
        ("--epsilon", "0"),
    ],
)
def test_a_flag_that_cannot_be_is_refused_by_its_name(tmp_path: Path, flag: str, value: str) -> None:
    done = init(tmp_path / "hub", flag, value)
    assert done.exit_code != 0
    assert flag in f"{done.exception} {done.output}"
    assert not (tmp_path / "hub").exists()


def test_a_model_folder_is_known_by_its_whole_path(
    tmp_path: Path, tiny_base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tiny_base.parent)
    assert init(tmp_path / "hub", "--base", tiny_base.name).exit_code == 0
    assert read_config(tmp_path / "hub").base_model == str(tiny_base)


def test_the_steps_after_init_suit_who_may_join(tmp_path: Path) -> None:
    opened = init(tmp_path / "hub", "--enrolment", "open", "--address", "hub.example.org:9443")
    assert "gym-client join --server hub.example.org:9443 --data FILE --fingerprint sha256:" in opened.output
    listed = init(tmp_path / "other", "--enrolment", "allow-list")
    assert "gym-client id" in listed.output
    assert "on this machine type" in listed.output


@pytest.mark.parametrize("address", ["127.0.0.1:9443", "hub.example.org:9443"])
def test_an_invite_comes_with_a_message_that_says_how_to_install_join_leave_and_uninstall(
    tmp_path: Path, address: str
) -> None:
    assert init(tmp_path / "hub", "--address", address, "--name", "our model").exit_code == 0
    done = CliRunner().invoke(app, ["invites", "create", "--dir", str(tmp_path / "hub")])
    link = done.stdout.split()[-1]
    assert link.startswith(f"gym://{address}/")
    message = done.stderr[done.stderr.index("You are invited") :].splitlines()
    assert message[0].startswith("You are invited to improve the model of our model with us.")
    assert link in message, "on a line of its own"
    order = [
        "pip install WHEEL (the file",
        "--invite LINK --data FILE",
        "gym-client leave",
        "gym-client uninstall",
    ]
    assert [next(n for n, line in enumerate(message) if step in line) for step in order] == [2, 4, 5, 6]
    assert ("only this machine" in done.stderr) is address.startswith("127.")
    assert "send its wheel along" in done.stderr


@pytest.mark.parametrize(
    ("url", "given", "command"),
    [
        (None, None, "pip install gym-fed"),
        ('{"url": "file:///gym_fed-0.2.0-py3-none-any.whl"}', None, "pip install WHEEL"),
        ('{"url": "file:///checkout"}', "pipx install gym-fed", "pipx install gym-fed"),
    ],
)
def test_the_command_that_installs_the_client_is_one_that_works(
    monkeypatch: pytest.MonkeyPatch, url: str | None, given: str | None, command: str
) -> None:
    class Installed(metadata.PathDistribution):
        def __init__(self) -> None:
            super().__init__(Path())

        def read_text(self, name: str | Path) -> str | None:
            return url if name == "direct_url.json" else ""

    monkeypatch.setattr(metadata, "distributions", lambda name: [Installed()])
    config = ServerConfig(dashboard=DashboardConfig(install=given))
    assert install_lines(config) == [command, "gym-client ui"]
    assert needs_wheel(config) is (command == "pip install WHEEL")


def test_each_note_gets_an_invite_and_both_are_on_one_line(tmp_path: Path) -> None:
    folder = tmp_path / "hub"
    assert init(folder, "--address", "hub.example.org:9443").exit_code == 0

    def create(*words: str) -> Any:
        return CliRunner().invoke(app, ["invites", "create", "--dir", str(folder), *words])

    done = create("--note", "for Ada", "--note", "Ben's sister")
    rows = [line.split("  ") for line in done.stdout.splitlines()]
    assert [[cell for cell in row if cell][1].strip() for row in rows] == ["for Ada", "Ben's sister"]
    assert len({find_invite(line) for line in done.stdout.splitlines()}) == 2
    assert "gym-client join --invite LINK --data FILE" in done.stderr
    assert not set(done.stderr.split()) & {find_invite(line) for line in done.stdout.splitlines()}
    listed = CliRunner().invoke(app, ["invites", "list", "--dir", str(folder)]).stdout
    for identifier, note in zip([row[1] for row in rows], ("for Ada", "Ben's sister"), strict=True):
        assert any(identifier in line and note in line for line in listed.splitlines())
    refused = create("--count", "3", "--note", "one", "--note", "two")
    assert isinstance(refused.exception, GymError)
    assert "--count 3 was passed with 2 notes" in str(refused.exception)
    assert len(CliRunner().invoke(app, ["invites", "list", "--dir", str(folder)]).stdout.splitlines()) == 3


@pytest.mark.slow  # a process with a terminal of its own
def test_a_real_terminal_is_asked(tmp_path: Path) -> None:
    master, slave = pty.openpty()
    command = [BIN / "gym-server", "init", "--dir", tmp_path / "hub"]
    process = subprocess.Popen(command, stdin=slave, stdout=slave, stderr=slave)
    os.close(slave)
    shown = b""
    for number in range(1, 10):
        while f"{number}/9".encode() not in shown or not shown.rstrip(b" ").endswith(b"]:"):
            shown += os.read(master, 4096)
        os.write(master, b"open\n" if number == 3 else b"\n")
        shown += os.read(master, 1)
    assert process.wait(SECONDS) == 0, shown
    os.close(master)
    assert read_config(tmp_path / "hub") == ServerConfig.model_validate(
        read_config(tmp_path / "hub").model_dump() | {"enrolment": {"policy": "open"}}
    )


@pytest.mark.parametrize(
    ("arguments", "begins"),
    [((), "starting the hub in "), pytest.param(("--json",), '{"error"', marks=pytest.mark.slow)],
)
def test_a_start_is_announced_before_what_takes_long(
    tmp_path: Path, arguments: tuple[str, ...], begins: str
) -> None:
    command = [BIN / "gym-server", "run", "--dir", tmp_path / "absent", *arguments]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == ErrorCode.FILE_NOT_FOUND.exit_code
    assert done.stderr.startswith(begins), done.stderr
