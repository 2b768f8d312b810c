"""The certificate of a hub: its own or an authority's, over one key; what contributors would refuse is refused here."""

from __future__ import annotations

import datetime
import json
from pathlib import Path
from typing import Any

import pytest
from gym_server.certificate import note_on_certificate, served_pair
from gym_server.cli.main import app
from gym_server.cli.setup import HubChoices, init_hub
from typer.testing import CliRunner

from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.trust.identity.tls import certificate_request, create_certificate, fingerprint
from tests.support.authority import NAME, Authority


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    folder = tmp_path_factory.mktemp("made") / "hub"
    return folder, init_hub(folder, HubChoices(address="hub.example.org:9443"))[1]


@pytest.fixture
def hub(made: tuple[Path, str]) -> Any:
    """The hub's folder, with its first certificate again afterwards."""
    before = (made[0] / "keys" / "tls.crt").read_bytes()
    yield made[0]
    (made[0] / "keys" / "tls.crt").write_bytes(before)


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path)


def run(hub: Path, *arguments: str) -> dict[str, Any]:
    done = CliRunner().invoke(app, ["certificate", *arguments, "--dir", str(hub), "--json"])
    assert done.exit_code == 0, (done.output, done.exception)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def refusal(hub: Path, *arguments: str) -> GymError:
    done = CliRunner().invoke(app, ["certificate", *arguments, "--dir", str(hub)])
    assert isinstance(done.exception, GymError), (done.output, done.exception)
    return done.exception


def test_an_authority_signs_what_is_requested_and_the_key_stays_what_contributors_pinned(
    hub: Path, made: tuple[Path, str], authority: Authority, tmp_path: Path
) -> None:
    assert run(hub, "show")["issuer"] is None
    requested = run(hub, "request", "--output", str(tmp_path / "hub.csr"))
    assert requested["host"] == "hub.example.org", "that of `advertise`"
    assert (tmp_path / "hub.csr").read_text() == requested["request"]
    (tmp_path / "chain.pem").write_bytes(authority.sign((tmp_path / "hub.csr").read_bytes()))
    added = run(hub, "add", str(tmp_path / "chain.pem"))
    assert (added["fingerprint"], added["host"]) == (made[1], "hub.example.org")
    assert NAME in added["issuer"]
    assert served_pair(hub, lambda _: b"")[1] == (tmp_path / "chain.pem").read_bytes(), "the whole chain"
    assert note_on_certificate(hub) == ""
    own = run(hub, "create")
    assert (own["fingerprint"], own["issuer"]) == (made[1], None)


def test_a_certificate_of_another_key_is_refused_and_nothing_is_written(
    hub: Path, made: tuple[Path, str], authority: Authority, tmp_path: Path
) -> None:
    other = create_certificate(tmp_path / "other.key", tmp_path / "other.crt")
    chain = tmp_path / "chain.pem"
    chain.write_bytes(
        authority.sign(certificate_request((tmp_path / "other.key").read_bytes(), "hub.example.org"))
    )
    error = refusal(hub, "add", str(chain))
    assert error.code is ErrorCode.CONFIG_INVALID
    assert other in error.message
    assert made[1] in error.message
    assert "certificate request" in error.hint
    assert fingerprint((hub / "keys" / "tls.crt").read_bytes()) == made[1]


def test_an_ended_certificate_is_refused_and_one_that_ends_soon_is_noted(
    hub: Path, authority: Authority, tmp_path: Path
) -> None:
    request, chain = certificate_request((hub / "keys" / "tls.key").read_bytes(), "hub"), tmp_path / "c.pem"
    chain.write_bytes(authority.sign(request, days=0))
    assert "expired on" in refusal(hub, "add", str(chain)).message
    chain.write_bytes(authority.sign(request, days=10))
    run(hub, "add", str(chain))
    assert "expires on" in note_on_certificate(hub)


def test_a_private_key_beside_the_chain_never_comes_into_the_file_that_everybody_may_read(
    hub: Path, authority: Authority, tmp_path: Path
) -> None:
    key, chain = (hub / "keys" / "tls.key").read_bytes(), tmp_path / "both.pem"
    signed = authority.sign(certificate_request(key, "hub"))
    chain.write_bytes(signed + key)
    run(hub, "add", str(chain))
    assert (hub / "keys" / "tls.crt").read_bytes() == signed


def test_a_certificate_that_has_not_begun_is_refused(
    hub: Path, authority: Authority, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chain, before = tmp_path / "c.pem", datetime.datetime.now(datetime.UTC) - datetime.timedelta(days=400)
    chain.write_bytes(authority.sign(certificate_request((hub / "keys" / "tls.key").read_bytes(), "hub")))

    class Clock(datetime.datetime):
        @classmethod
        def now(cls, tz: datetime.tzinfo | None = None) -> Any:
            return before

    monkeypatch.setattr("gym_server.certificate.datetime.datetime", Clock)
    error = refusal(hub, "add", str(chain))
    assert "is valid from" in error.message
    assert "clock" in error.hint


def test_no_more_of_a_file_is_read_than_a_chain_can_have(hub: Path, tmp_path: Path) -> None:
    with (tmp_path / "c.pem").open("wb") as file:
        file.truncate(1 << 30)
    assert "larger than" in refusal(hub, "add", str(tmp_path / "c.pem")).message


@pytest.mark.parametrize("content", [b"", b"-----BEGIN CERTIFICATE-----\n"])
def test_what_is_no_certificate_is_refused_by_the_name_of_its_file(
    hub: Path, tmp_path: Path, content: bytes
) -> None:
    (tmp_path / "chain.pem").write_bytes(content)
    error = refusal(hub, "add", str(tmp_path / "chain.pem"))
    assert (error.code, "chain.pem" in error.message) == (ErrorCode.CONFIG_INVALID, True)
    assert refusal(hub, "add", str(tmp_path / "absent.pem")).code is ErrorCode.FILE_NOT_FOUND


def test_a_certificate_that_was_put_there_by_hand_over_another_key_is_not_served(
    hub: Path, tmp_path: Path
) -> None:
    create_certificate(tmp_path / "other.key", hub / "keys" / "tls.crt")
    with pytest.raises(GymError) as caught:
        served_pair(hub, lambda _: b"")
    assert caught.value.code is ErrorCode.CONFIG_INVALID
    assert f"gym-server certificate create --dir {hub}" in caught.value.hint
    run(hub, "create")
    served_pair(hub, lambda _: b"")


def test_a_hub_without_an_address_for_others_needs_the_name_of_its_host(tmp_path: Path) -> None:
    init_hub(tmp_path / "local", HubChoices())
    assert "request HOST" in refusal(tmp_path / "local", "request").hint
