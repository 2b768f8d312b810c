"""What would fail at the first merge is refused before the hub listens, naming the key and the remedy."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from gym_server.accounts.invitations import cancel_invites, invites_of, make_invites
from gym_server.cli.checks_at_start import check_at_start
from gym_server.cli.run import gate_line, run_hub
from gym_server.cli.setup import HubChoices, init_hub
from gym_server.federation import Federation

from gym_fed.config.hub.sections import GateConfig
from gym_fed.config.hub.server import ServerConfig
from gym_fed.config.yaml.file import load_config
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.privacy.accountant import NoiseEvent, epsilon
from gym_fed.trust.identity.keys import SigningKey
from gym_fed.trust.identity.login import parse_invite
from tests.support.private_hub import PRIVATE, private_hub

ROW = json.dumps({"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]})


@pytest.fixture
def folder(tmp_path: Path, tiny_base: Path) -> Path:
    init_hub(tmp_path / "hub", HubChoices(str(tiny_base), "checked", "invite"))
    return tmp_path / "hub"


@pytest.fixture
def hub(folder: Path) -> Iterator[Federation]:
    change(folder, listen="127.0.0.1:9443")
    with Federation.open(folder) as fed:
        yield fed


def change(folder: Path, **values: Any) -> None:
    path = folder / "gym-server.yaml"
    path.write_text(yaml.safe_dump({**yaml.safe_load(path.read_text()), **values}))


def refusal(folder: Path) -> GymError:
    """What `gym-server run` ends with; that it never listens is part of it."""
    with pytest.raises(GymError) as caught:
        run_hub(folder, on_listening=lambda *_: pytest.fail("it listened"))
    return caught.value


def test_a_held_out_file_that_is_absent_is_named_before_the_hub_listens(folder: Path) -> None:
    change(folder, gate={"heldout": "absent.jsonl"})
    error = refusal(folder)
    assert error.code is ErrorCode.FILE_NOT_FOUND
    assert "gate.heldout" in error.message
    assert "absent.jsonl" in error.message


def test_a_folder_of_evaluation_sets_that_is_absent_is_refused_also_without_evaluations(folder: Path) -> None:
    change(folder, gate={"evals_data": "nofolder"})
    error = refusal(folder)
    assert error.code is ErrorCode.FILE_NOT_FOUND
    assert error.message == f"gate.evals_data: no folder at {folder / 'nofolder'}"


def test_the_log_names_what_every_soup_passes() -> None:
    assert gate_line(GateConfig()) == ""
    line = gate_line(GateConfig(evals=[{"suite": "tiny", "limit": 32}], safety={"max_margin_drop": 0.5}))
    assert "gate.evals tiny (32 rows of each task, a drop of at most 0.02 with 95% confidence)" in line
    assert "gate.safety (the refusal margin drops by at most 0.5 nats with 95% confidence)" in line


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("", ErrorCode.DATA_INVALID),
        ("{not json}\n", ErrorCode.DATA_INVALID),
        ('{"picture": 1}\n', ErrorCode.DATA_INVALID),
    ],
)
def test_a_held_out_file_that_cannot_be_used_is_refused(folder: Path, text: str, code: ErrorCode) -> None:
    (folder / "heldout.jsonl").write_text(text)
    change(folder, gate={"heldout": "heldout.jsonl"})
    error = refusal(folder)
    assert error.code is code
    assert error.message.startswith("gate.heldout: ")


def test_held_out_rows_of_which_nothing_fits_are_refused_and_some_are_noted(folder: Path) -> None:
    long = json.loads(ROW)
    long["messages"][0]["content"] = "a" * 500
    (folder / "heldout.jsonl").write_text(json.dumps(long) + "\n")
    change(folder, gate={"heldout": "heldout.jsonl", "max_length": 64})
    error = refusal(folder)
    assert error.code is ErrorCode.DATA_INVALID
    assert "gate.heldout" in error.message
    (folder / "heldout.jsonl").write_text(f"{json.dumps(long)}\n{ROW}\n")
    with Federation.open(folder) as fed:
        assert any("1 of 2 rows" in note for note in check_at_start(fed.state, fed.config, fed.recipes))


@pytest.mark.parametrize(
    ("score", "said"),
    [
        ("participation", "participation pays for noise"),
        ("estimate", "scores on 1 held-out row are uncertain"),
    ],
)
def test_held_out_rows_that_judge_the_pay_badly_or_not_at_all_are_noted(
    folder: Path, score: str, said: str
) -> None:
    (folder / "heldout.jsonl").write_text(f"{ROW}\n")
    change(folder, gate={"heldout": "heldout.jsonl"}, rewards={"score": score})
    with Federation.open(folder) as fed:
        assert any(said in note for note in check_at_start(fed.state, fed.config, fed.recipes))


def test_root_data_that_is_absent_is_refused(folder: Path) -> None:
    change(folder, root={"data": "root.jsonl"}, soup={"aggregator": "fltrust", "num_malicious_nodes": 0})
    error = refusal(folder)
    assert error.code is ErrorCode.FILE_NOT_FOUND
    assert error.message.startswith("root.data: ")


def test_a_base_that_went_away_or_changed_is_refused(folder: Path, tiny_base: Path, tmp_path: Path) -> None:
    moved = tmp_path / "moved"
    shutil.copytree(tiny_base, moved)
    change(folder, base_model=str(moved))
    with Federation.open(folder):
        pass  # the base's digest is on record
    from safetensors.torch import load_file, save_file

    tensors = load_file(moved / "model.safetensors")
    save_file(
        {name: tensor + 1 for name, tensor in tensors.items()}, moved / "model.safetensors", {"format": "pt"}
    )
    error = refusal(folder)
    assert error.code is ErrorCode.BASE_MISMATCH
    shutil.rmtree(moved)
    with Federation.open(folder) as fed, pytest.raises(GymError, match="base_model: ") as caught:
        check_at_start(fed.state, fed.config, fed.recipes)
    assert caught.value.code is ErrorCode.MODEL_NOT_FOUND


def test_more_rounds_than_the_budget_pays_for_are_refused_with_what_to_write(
    tmp_path: Path, tiny_base: Path
) -> None:
    three = epsilon([NoiseEvent(noise_multiplier=1.0, count=3)], 1e-5)
    folder = private_hub(
        tmp_path / "hub", tiny_base, privacy={"noise_multiplier": 1.0, "epsilon": three * 1.01}
    )
    error = refusal(folder)
    assert error.code is ErrorCode.CONFIG_INVALID
    assert "allows 3 more rounds" in error.message
    assert "rounds.num_rounds 5" in error.message
    needed = re.search(r"privacy.noise_multiplier: ([\d.]+)", error.hint)
    assert needed is not None
    remedies: list[dict[str, Any]] = [
        {"rounds": {**PRIVATE["rounds"], "num_rounds": 3}},
        {"privacy": {"noise_multiplier": float(needed[1]), "epsilon": three * 1.01}},
        {"privacy": {"noise_multiplier": 1.0, "epsilon": three * 1.01, "end_when_spent": True}},
    ]
    before = (folder / "gym-server.yaml").read_text()
    for remedy in remedies:
        (folder / "gym-server.yaml").write_text(before)
        change(folder, **remedy)
        with Federation.open(folder) as fed:
            notes = check_at_start(fed.state, fed.config, fed.recipes)
        assert any("ends when the budget is spent" in note for note in notes) is (remedy is remedies[2])


@pytest.mark.parametrize("number", [errno.EROFS, errno.EACCES, errno.ENOSPC])
@pytest.mark.parametrize("which", ["the hub's folder", "staging"])
def test_a_folder_in_which_nothing_can_be_written_is_named(
    folder: Path, monkeypatch: pytest.MonkeyPatch, which: str, number: int
) -> None:
    refusing, make = (
        (folder if which != "staging" else folder / "staging").resolve(),
        tempfile.NamedTemporaryFile,
    )

    def made(*arguments: Any, **options: Any) -> Any:
        if Path(options["dir"]).resolve() == refusing:
            raise OSError(number, os.strerror(number))
        return make(*arguments, **options)

    with Federation.open(folder) as fed:
        check_at_start(fed.state, fed.config, fed.recipes)
        monkeypatch.setattr(tempfile, "NamedTemporaryFile", made)
        with pytest.raises(GymError) as caught:
            check_at_start(fed.state, fed.config, fed.recipes)
    full = number == errno.ENOSPC
    assert caught.value.code is (ErrorCode.DISK_FULL if full else ErrorCode.NOT_WRITABLE)
    assert caught.value.message.startswith(f"{refusing}: ")


@pytest.mark.parametrize("key", ["listen", "advertise"])
@pytest.mark.parametrize(
    "value", ["hub.example.org", "hub:", "hub:x", "hub:99999", ":9443", "::1:9443", "a b:1"]
)
def test_an_address_that_is_none_is_refused_by_file_line_and_column(
    folder: Path, key: str, value: str
) -> None:
    change(folder, **{key: value})
    path = folder / "gym-server.yaml"
    with pytest.raises(GymError) as caught:
        load_config(path, ServerConfig)
    assert caught.value.code is ErrorCode.CONFIG_INVALID
    assert re.match(rf"{re.escape(str(path))}:\d+:\d+: {key}", caught.value.message)


@pytest.mark.parametrize("value", ["0.0.0.0:9443", "[::]:9443"])
def test_an_address_that_is_everywhere_can_be_listened_at_and_not_advertised(
    folder: Path, value: str
) -> None:
    change(folder, listen=value)
    with Federation.open(folder) as fed, pytest.raises(GymError) as caught:
        make_invites(fed.config, fed.folder, fed.accounts, fed.fingerprint, [""], 60)
    assert caught.value.code is ErrorCode.CONFIG_INVALID
    assert "advertise" in caught.value.hint
    change(folder, listen=value, advertise="hub.example.org:443")
    with Federation.open(folder) as fed:
        invite = parse_invite(
            make_invites(fed.config, fed.folder, fed.accounts, fed.fingerprint, [""], 60)[0]["invite"]
        )
    assert (invite.host, invite.port) == ("hub.example.org", 443)
    change(folder, advertise=value)
    with pytest.raises(GymError, match="advertise"):
        load_config(folder / "gym-server.yaml", ServerConfig)


def test_invites_are_made_by_the_dozen_listed_and_cancelled(hub: Federation) -> None:
    made = make_invites(
        hub.config, hub.folder, hub.accounts, hub.fingerprint, ["class\x1b[2J of 26"] * 12, 3600
    )
    assert len({one["invite"] for one in made}) == 12
    assert {one["state"] for one in invites_of(hub.database, hub.clock)} == {"open"}
    assert {one["note"] for one in invites_of(hub.database, hub.clock)} == {"class\\x1b[2J of 26"}
    cancel_invites(hub.database, hub.clock, [one["id"] for one in made[:2]])
    key = SigningKey.generate()
    for number, word in ((0, "expired"), (1, "expired"), (2, None)):
        token = parse_invite(made[number]["invite"]).token
        if word is None:
            hub.accounts._register(key.public_key, "ann", token)
        else:
            with pytest.raises(GymError, match=word):
                hub.accounts._register(key.public_key, "ann", token)
    states = {one["id"]: one["state"] for one in invites_of(hub.database, hub.clock)}
    assert [states[one["id"]] for one in made] == ["cancelled"] * 2 + ["used"] + ["open"] * 9
    for taken in (made[0]["id"], made[2]["id"], "%", "absent"):
        with pytest.raises(GymError) as caught:
            cancel_invites(hub.database, hub.clock, [made[3]["id"], taken])
        assert caught.value.code is ErrorCode.NOT_FOUND
    assert {one["id"]: one["state"] for one in invites_of(hub.database, hub.clock)} == states, "all or none"


def test_a_private_hub_runs_no_strategy_that_adds_no_noise(tmp_path: Path, tiny_base: Path) -> None:
    folder = private_hub(tmp_path / "hub", tiny_base)
    with pytest.raises(GymError, match="other than DeltaSoup neither clips nor adds noise"):
        run_hub(folder, exit_when_done=True, insecure=True, server_app=lambda grid: None)
