"""A hub behind an HTTP proxy: its certificate and its calls take the same way, and errors name the proxy."""

from __future__ import annotations

import base64
from pathlib import Path

import pytest
from gym_client.hub.transport import HubClient
from gym_client.identity.address import Address
from gym_client.identity.home import Home
from gym_client.identity.proxy import EXCEPTIONS, VARIABLES, proxy_for
from gym_client.identity.trust import establish, fetch_certificate

from gym_fed.core.errors import ErrorCode, GymError
from tests.support.connect_proxy import ConnectProxy
from tests.support.tiny_hub import TinyHub

HUB = Address("hub.invalid", 9443)
"""A name that nobody but the proxy knows (RFC 6761)."""


@pytest.fixture(autouse=True)
def _no_proxies(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*VARIABLES, *EXCEPTIONS):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize("variable", VARIABLES)
def test_pinning_and_calls_go_through_the_proxy_of_any_of_the_variables(
    hub: TinyHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variable: str
) -> None:
    with ConnectProxy({str(HUB): hub.port}) as proxy:
        monkeypatch.setenv(variable, f"http://ann:s%40cret@{proxy.address}")
        home = Home.open(tmp_path / "home")
        pin = establish(home, HUB, hub.fingerprint, lambda _: False)
        assert proxy.seen == [str(HUB)]
        with HubClient(home, HUB, pin) as client:
            assert client.status().name == "tiny"
        assert proxy.seen == [str(HUB)] * 2
        token = base64.b64encode(b"ann:s@cret").decode()
        sent = [line for line in proxy.headers if line.lower().startswith("proxy-authorization")]
        assert len(sent) == 2
        assert all(token in line for line in sent)


@pytest.mark.parametrize("exception", ["hub.invalid", ".invalid", "invalid", "x, hub.invalid ", "*"])
@pytest.mark.parametrize("variable", EXCEPTIONS)
def test_a_hub_that_no_proxy_names_is_reached_directly(
    monkeypatch: pytest.MonkeyPatch, variable: str, exception: str
) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    assert proxy_for(HUB) is not None
    monkeypatch.setenv(variable, exception)
    assert proxy_for(HUB) is None
    assert proxy_for(Address("hub.example.org", 9443)) is None or exception != "*"


def test_networks_of_no_proxy_are_understood_and_this_machine_needs_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("http_proxy", "proxy:1")
    monkeypatch.setenv("no_proxy", "10.0.0.0/8,192.168.1.5")
    direct = ["10.1.2.3", "192.168.1.5", "127.0.0.1", "localhost", "::1"]
    assert [host for host in direct if proxy_for(Address(host, 1)) is not None] == []
    assert all(proxy_for(Address(host, 1)) is not None for host in ("11.1.2.3", "192.168.1.50", "10.hub"))


def test_a_hub_on_this_machine_is_called_directly_whatever_the_environment_says(
    hub: TinyHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in VARIABLES:
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    home, address = Home.open(tmp_path / "home"), Address.parse(hub.address)
    with HubClient(home, address, establish(home, address, hub.fingerprint, lambda _: False)) as client:
        assert client.status().name == "tiny"


def test_a_proxy_that_refuses_or_is_away_is_named_with_its_variable_and_without_its_password(
    hub: TinyHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with ConnectProxy({}, refuse="403 Forbidden") as proxy:
        monkeypatch.setenv("https_proxy", f"http://ann:secret@{proxy.address}")
        with pytest.raises(GymError, match="403 Forbidden") as refused:
            fetch_certificate(HUB)
        home = Home.open(tmp_path / "home")
        pin = establish(home, Address.parse(hub.address), hub.fingerprint, lambda _: False)
        with HubClient(home, HUB, pin) as client, pytest.raises(GymError) as called:
            client.status()
    monkeypatch.setenv("https_proxy", "http://ann:secret@127.0.0.1:9")
    with pytest.raises(GymError) as away:
        fetch_certificate(HUB)
    for caught in (refused, called, away):
        assert caught.value.code is ErrorCode.UNAVAILABLE
        assert "the proxy 127.0.0.1:" in caught.value.message
        assert "(https_proxy)" in caught.value.message
        assert "secret" not in str(caught.value)
    assert "no_proxy" in refused.value.hint


@pytest.mark.parametrize("text", ["socks5://proxy:1080", "https://proxy:1", "http://", "http://proxy:port"])
def test_a_variable_that_names_no_http_proxy_is_refused_by_its_name(
    monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    monkeypatch.setenv("https_proxy", text)
    with pytest.raises(GymError, match="https_proxy is not an HTTP proxy") as caught:
        proxy_for(HUB)
    assert caught.value.code is ErrorCode.USAGE
