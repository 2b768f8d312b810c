"""The keys of a home: under a passphrase, replaced at every hub, revoked; and nothing lost by a kill."""

from __future__ import annotations

import json
import os
import signal
import stat
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from gym_client.hub.rotation import revoke, rotate
from gym_client.hub.transport import HubClient
from gym_client.identity import keystore
from gym_client.identity.address import Address
from gym_client.identity.home import Home
from gym_client.identity.keystore import Keystore, passphrases
from gym_client.identity.pins import enrolled, key_at
from gym_client.identity.trust import establish

from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.trust.identity import keys
from gym_fed.trust.identity.keys import SigningKey, verify_signature
from gym_fed.trust.identity.passphrase import PassphraseSource
from gym_fed.trust.identity.statements import Revocation, Rotation
from gym_fed.trust.wire.v1 import hub_pb2 as pb
from tests.support.tiny_hub import TinyHub
from tests.support.warm import run

WORDS = "correct horse battery"


class KeyHub(TinyHub):
    """A tiny hub whose accounts can get another key."""

    def RotateKey(self, request: Any, context: Any) -> pb.KeyReply:
        said = Rotation.parse(request.statement_json)
        said.verify(request.new_public_key, request.new_signature)
        if self.enrolled[said.rotate] != request.new_public_key:
            said.verify(self.enrolled[said.rotate], request.signature)
            self.enrolled[said.rotate] = request.new_public_key
        return pb.KeyReply(receipt_json="{}")

    def RevokeKey(self, request: Any, context: Any) -> pb.KeyReply:
        said = Revocation.parse(request.statement_json)
        said.verify(request.signing_key, request.signature)
        del self.enrolled[request.contributor]
        return pb.KeyReply(receipt_json="{}")


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[KeyHub]:
    hub = KeyHub(tmp_path / "hub").start()
    yield hub
    hub.stop()


@pytest.fixture
def quick_scrypt(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keys, "SCRYPT_N", 1 << 10)


def client_of(home: Home, hub: TinyHub) -> HubClient:
    address = Address.parse(hub.address)
    return HubClient(home, address, establish(home, address, hub.fingerprint, lambda _: False))


def enrol(home: Home, hub: TinyHub) -> str:
    with client_of(home, hub) as client:
        return client.enrol("n")


def gym_client(*arguments: object, **environment: str) -> subprocess.CompletedProcess[str]:
    kept = {k: v for k, v in os.environ.items() if k != "GYM_PASSPHRASE"}
    return run(["gym-client", *map(str, arguments)], env={**kept, **environment})


def forget_everything(folder: Path) -> None:
    """What a new process knows."""
    keystore._opened.clear()
    keystore._sources.pop(folder, None)


# ---- passphrase ----


def test_an_encrypted_key_has_strong_parameters_and_opens_with_its_passphrase_only(tmp_path: Path) -> None:
    key, path = SigningKey.generate(), tmp_path / "key.pem"
    key.save(path, WORDS.encode())
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    der = subprocess.run(["openssl", "asn1parse", "-in", path], capture_output=True, text=True).stdout
    assert "scrypt" in der
    assert "020000" in der, "N = 2^17"
    assert SigningKey.load(path, lambda what: WORDS.encode()).public_key == key.public_key
    for given, message in ((lambda what: b"wrong", "does not decrypt"), (None, "no passphrase was given")):
        with pytest.raises(GymError, match=message) as caught:
            SigningKey.load(path, given)
        assert caught.value.code is ErrorCode.KEY_LOCKED


@pytest.mark.usefixtures("quick_scrypt")
def test_encrypting_leaves_no_plain_key_behind_and_the_passphrase_is_asked_once(home: Home) -> None:
    key = home.key
    plain = (home.folder / "key.pem").read_bytes()
    (home.folder / ".key.pem.0123456789abcdef.partial").write_bytes(plain)  # left by a kill
    store = Keystore(home.folder)
    store.encrypt(PassphraseSource("NONE", ask=lambda question: WORDS))
    secret = plain.splitlines()[1]
    assert not [p for p in home.folder.rglob("*") if p.is_file() and secret in p.read_bytes()]
    forget_everything(home.folder)
    asked: list[str] = []
    passphrases(home.folder).ask = lambda question: asked.append(question) or WORDS
    assert home.key.public_key == Home.open(home.folder).key.public_key == key.public_key
    assert len(asked) == 1
    store.decrypt()
    assert store.is_encrypted is False
    assert home.key.public_key == key.public_key


@pytest.mark.usefixtures("quick_scrypt")
def test_a_change_of_passphrase_that_was_killed_half_way_goes_on(home: Home) -> None:
    store, old = Keystore(home.folder), home.key
    store.keep_main()
    store.encrypt(PassphraseSource("NONE", ask=lambda question: WORDS))
    former = next((home.folder / "keys").glob("*.pem"))
    former.write_bytes(old.to_pem(b"the new words"))  # written, and then the process was killed
    passphrases(home.folder).ask = lambda question: WORDS
    store.encrypt(PassphraseSource("NONE", ask=lambda question: "the new words"))
    for path in (former, store.main_path):
        assert SigningKey.load(path, lambda what: b"the new words").public_key == old.public_key


@pytest.mark.usefixtures("quick_scrypt")
def test_a_passphrase_typed_differently_or_too_short_changes_nothing(home: Home) -> None:
    before = home.key.to_pem()
    answers = iter([WORDS, WORDS + "x", "short", "short"])
    for message in ("differ", "fewer than 8"):
        with pytest.raises(GymError, match=message):
            Keystore(home.folder).encrypt(PassphraseSource("NONE", ask=lambda question: next(answers)))
    assert (home.folder / "key.pem").read_bytes() == before


def test_at_the_terminal_the_variable_or_the_file_opens_the_key_and_nothing_else(tmp_path: Path) -> None:
    home = tmp_path / "h"
    (tmp_path / "words").write_text(WORDS + "\n")
    done = gym_client("key", "encrypt", "--home", home, "--json", GYM_PASSPHRASE=WORDS)
    assert json.loads(done.stdout)["encrypted"] is True, done.stderr
    shown = gym_client("id", "--home", home, "--passphrase-file", tmp_path / "words", "--json")
    assert json.loads(shown.stdout)["contributor"], shown.stderr
    refused = gym_client("id", "--home", home)
    assert refused.returncode == ErrorCode.KEY_LOCKED.exit_code
    assert "GYM_PASSPHRASE" in refused.stderr
    wrong = gym_client("id", "--home", home, GYM_PASSPHRASE="something else")
    assert wrong.returncode == ErrorCode.KEY_LOCKED.exit_code
    assert "does not decrypt" in wrong.stderr
    assert "something else" not in wrong.stderr


@pytest.mark.usefixtures("quick_scrypt")
def test_an_exported_key_opens_the_account_in_another_home(
    tmp_path: Path, home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    from gym_client.cli.keys import export, import_key

    monkeypatch.setenv("GYM_PASSPHRASE", WORDS)
    export(tmp_path / "out.pem", home.folder)
    assert b"ENCRYPTED" in (tmp_path / "out.pem").read_bytes()
    import_key(tmp_path / "out.pem", tmp_path / "other")
    assert Home.open(tmp_path / "other").key.public_key == home.key.public_key
    with pytest.raises(GymError, match="never overwritten"):
        import_key(tmp_path / "out.pem", home.folder)


# ---- rotation ----


def test_a_rotation_changes_the_key_at_every_hub_and_keeps_the_id(home: Home, hub: KeyHub) -> None:
    account, old = enrol(home, hub), home.key
    rotated = rotate(home)
    assert [line["rotated"] for line in rotated["servers"]] == [True]
    assert home.key.public_key.hex() == rotated["public_key"] != old.public_key.hex()
    with client_of(home, hub) as client:
        client.authenticate()
    key = key_at(home, hub.server)
    assert key.contributor == account == old.contributor
    verify_signature(home.key.public_key, {"a": 1}, key.sign({"a": 1}))
    assert not list((home.folder / "keys").iterdir()), "no hub needs the old key any more"


def test_a_hub_that_is_away_keeps_the_old_key_until_the_command_is_given_again(
    home: Home, hub: KeyHub, tmp_path: Path
) -> None:
    away = KeyHub(tmp_path / "away").start()
    account = enrol(home, hub)
    enrol(home, away)
    away.stop()
    first = rotate(home)
    by_server = {line["server"]: line for line in first["servers"]}
    assert by_server[hub.server]["rotated"] is True
    assert by_server[away.server]["error"]["code"] == "unavailable"
    away.start()
    try:
        with client_of(home, away) as client:
            client.authenticate()  # with the old key
        assert rotate(home)["public_key"] == first["public_key"], "the same rotation, not another one"
        assert away.enrolled[account] == hub.enrolled[account] == home.key.public_key
    finally:
        away.stop()


@pytest.mark.parametrize("is_away", [False, True], ids=["hub there", "hub away"])
def test_an_account_that_was_left_keeps_its_key_and_is_joined_again(
    home: Home, hub: KeyHub, is_away: bool
) -> None:
    account, old = enrol(home, hub), home.key.public_key
    with client_of(home, hub) as client:
        client.forget_enrolment()
    assert enrolled(home) == []
    if is_away:
        hub.stop()
    for _ in range(2):
        rotate(home, another=True)
    if is_away:
        hub.start()
    with client_of(home, hub) as client:
        assert client.sign({"a": 1}) == Keystore(home.folder).find(hub.enrolled[account].hex()).sign({"a": 1})
        assert (hub.enrolled[account] == old) is is_away


@pytest.mark.parametrize("where", ["key-prepared", "key-rotation-answered", "key-rotated-at-a-hub"])
def test_a_rotation_that_is_killed_goes_on_with_the_same_key(home: Home, hub: KeyHub, where: str) -> None:
    account = enrol(home, hub)
    killed = gym_client("key", "rotate", "--home", home.folder, GYM_FAILPOINTS=where)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    with pytest.raises(GymError, match="was interrupted"):
        client_of(home, hub)
    wanted = Keystore(home.folder).next().public_key
    again = rotate(home)
    assert (again["public_key"], again["servers"][0]["rotated"]) == (wanted.hex(), True)
    assert hub.enrolled[account] == wanted == home.key.public_key
    with client_of(home, hub) as client:
        client.authenticate()


def test_a_revocation_is_signed_by_the_key_of_each_hub(home: Home, hub: KeyHub) -> None:
    account = enrol(home, hub)
    assert [line["revoked"] for line in revoke(home)] == [True]
    assert account not in hub.enrolled
    with pytest.raises(GymError, match="has no account at"):
        revoke(home, address=Address.parse("127.0.0.1:1"))
    assert len(enrolled(home)) == 1


def test_revoking_without_a_terminal_needs_yes(tmp_path: Path) -> None:
    done = gym_client("key", "revoke", "--home", tmp_path, "--json")
    assert json.loads(done.stderr)["error"]["hint"] == "pass --yes"
