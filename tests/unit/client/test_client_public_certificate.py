"""A hub whose key an authority vouches for: pinned by its key like any other, through renewals and changes of kind."""

from __future__ import annotations

import ssl
from pathlib import Path

import pytest
from gym_client.hub.transport import HubClient
from gym_client.identity.address import Address
from gym_client.identity.home import Home
from gym_client.identity.trust import establish, vouching_authority

from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.trust.identity.tls import certificate_host, certificate_request, self_signed
from tests.support.authority import NAME, Authority
from tests.support.tiny_hub import TinyHub


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path)


def serve_signed(hub: TinyHub, authority: Authority, host: str = "127.0.0.1") -> None:
    """From now on the hub shows a certificate of the authority over its own key."""
    hub.stop()
    request = certificate_request((hub.folder / "tls.key").read_bytes(), host)
    (hub.folder / "tls.crt").write_bytes(authority.sign(request))
    hub.start()


def met(home: Home, hub: TinyHub) -> HubClient:
    address = Address.parse(hub.address)
    return HubClient(home, address, establish(home, address, hub.fingerprint, lambda _: False))


@pytest.mark.parametrize("host", ["127.0.0.1", "hub.example.org"])
def test_a_hub_with_an_authoritys_certificate_is_called_under_the_pin_of_its_key(
    tmp_path: Path, hub: TinyHub, authority: Authority, host: str
) -> None:
    serve_signed(hub, authority, host)
    with met(Home.open(tmp_path / "home"), hub) as client:
        assert client.status().name == "tiny"
        assert certificate_host(client.pin.certificate_pem.encode()) == host
        assert client.pin.fingerprint == hub.fingerprint


def test_an_agent_at_work_takes_up_another_certificate_of_the_same_key(
    tmp_path: Path, hub: TinyHub, authority: Authority
) -> None:
    with met(Home.open(tmp_path / "home"), hub) as client:
        client.status()
        serve_signed(hub, authority)
        client.check_key()
        assert client.status().name == "tiny"
        hub.stop()
        (hub.folder / "tls.crt").write_bytes(self_signed((hub.folder / "tls.key").read_bytes()))
        hub.start()
        client.check_key()
        assert client.status().name == "tiny"


def test_an_authoritys_word_does_not_replace_the_pinned_key(
    tmp_path: Path, hub: TinyHub, authority: Authority, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SSL_CERT_FILE", str(authority.root))
    home = Home.open(tmp_path / "home")
    with met(home, hub) as client:
        client.status()
        hub.stop()
        hub.change_key()
        hub.start()
        serve_signed(hub, authority)
        with pytest.raises(GymError) as caught:
            client.check_key()
    assert caught.value.code is ErrorCode.SERVER_KEY_CHANGED
    with pytest.raises(GymError) as caught:
        establish(home, Address.parse(hub.address), None, lambda _: True)
    assert caught.value.code is ErrorCode.SERVER_KEY_CHANGED


def test_an_authority_is_named_only_where_this_machine_trusts_it_for_this_host_and_key(
    hub: TinyHub, authority: Authority, monkeypatch: pytest.MonkeyPatch
) -> None:
    address = Address.parse(hub.address)
    monkeypatch.setenv("SSL_CERT_FILE", str(authority.root))
    assert vouching_authority(address, hub.fingerprint) == "", "the hub signs for itself"
    serve_signed(hub, authority, "hub.example.org")
    assert vouching_authority(address, hub.fingerprint) == "", "the certificate is another host's"
    serve_signed(hub, authority)
    assert vouching_authority(address, hub.fingerprint) == NAME
    assert vouching_authority(address, "sha256:" + "0" * 64) == "", "another key was shown before"
    monkeypatch.setenv("SSL_CERT_FILE", "/dev/null")
    assert vouching_authority(address, hub.fingerprint) == "", "nobody here trusts this authority"


def test_an_authority_without_key_identifiers_is_named_also_where_python_verifies_strictly(
    hub: TinyHub, authority: Authority, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = ssl.create_default_context

    def strict() -> ssl.SSLContext:  # the default of Python 3.13
        context = plain()
        context.verify_flags |= ssl.VERIFY_X509_STRICT
        return context

    monkeypatch.setattr(ssl, "create_default_context", strict)
    monkeypatch.setenv("SSL_CERT_FILE", str(authority.root))
    serve_signed(hub, authority)
    assert vouching_authority(Address.parse(hub.address), hub.fingerprint) == NAME


@pytest.mark.parametrize("host", ["", "hub example", "hub.example.org:9443", "-hub", "a\x1b[2J"])
def test_a_host_that_no_certificate_can_name_is_refused(hub: TinyHub, host: str) -> None:
    with pytest.raises(GymError) as caught:
        certificate_request((hub.folder / "tls.key").read_bytes(), host)
    assert caught.value.code is ErrorCode.USAGE
    assert "\x1b" not in caught.value.message
