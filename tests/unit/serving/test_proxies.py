"""Reverse proxies: what their headers and the path prefix change, and for whom."""

from __future__ import annotations

from typing import Any

import pytest

from gym_fed.core.errors import GymError
from gym_fed.serving.http.proxies import BehindProxy, Proxies, route_path


async def seen(proxies: Proxies, path: str, peer: str = "10.0.0.2", **headers: str) -> dict[str, Any]:
    """The scope that the application gets, and the status where it gets none."""
    found: dict[str, Any] = {}

    async def app(scope: Any, receive: Any, send: Any) -> None:
        found.update(scope)

    async def send(message: Any) -> None:
        found.setdefault("status", message.get("status"))

    given = [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()]
    scope = {"type": "http", "method": "GET", "scheme": "http", "path": path, "raw_path": path.encode()}
    await BehindProxy(app, proxies)({**scope, "headers": given, "client": (peer, 1)}, None, send)  # type: ignore[arg-type]
    return found


@pytest.mark.parametrize(
    ("path", "route"),
    [("/gym/v1/models", "/v1/models"), ("/v1/models", "/v1/models"), ("/gym", "/"), ("/gymnast", "/gymnast")],
)
async def test_the_root_path_is_removed_whether_or_not_the_proxy_did_it(path: str, route: str) -> None:
    scope = await seen(Proxies("/gym"), path)
    assert (scope["root_path"], route_path(scope)) == ("/gym", route)
    assert scope["raw_path"] == scope["path"].encode() == b"/gym" + route.encode()


async def test_a_trusted_proxy_names_prefix_client_and_scheme() -> None:
    proxies = Proxies(trusted=("10.0.0.0/24",))
    forwarded = {"x_forwarded_prefix": "/api/", "x_forwarded_for": "192.0.2.7", "x_forwarded_proto": "https"}
    scope = await seen(proxies, "/api/v1/session", **forwarded)
    assert (scope["root_path"], route_path(scope)) == ("/api", "/api/v1/session")
    assert (scope["client"][0], scope["scheme"]) == ("192.0.2.7", "https")
    mapped = await seen(proxies, "/", peer="::ffff:10.0.0.2", x_forwarded_for="192.0.2.7")
    assert mapped["client"][0] == "192.0.2.7"


@pytest.mark.parametrize("trusted", [(), ("10.0.0.2/32",)])
async def test_the_headers_of_anybody_else_are_ignored(trusted: tuple[str, ...]) -> None:
    forged = {"x_forwarded_prefix": "/evil", "x_forwarded_for": "192.0.2.7", "x_forwarded_proto": "https"}
    for peer in ("127.0.0.1", "10.0.0.3", "::1", "nonsense", ""):
        scope = await seen(Proxies("/gym", trusted), "/", peer, **forged)
        assert (scope["root_path"], scope["client"][0], scope["scheme"]) == ("/gym", peer, "http")


@pytest.mark.parametrize(
    "prefix",
    [
        "//evil.example",
        "gym",
        "/a/../b",
        "/a//b",
        '/"><script>',
        "/a b",
        "/a\r\nX: y",
        "/%2e",
        "/é",
        "/" + "a" * 300,
        "/a,/b",
    ],
)
async def test_a_prefix_of_other_than_path_characters_is_refused(prefix: str) -> None:
    assert (await seen(Proxies(trusted=("10.0.0.2/32",)), "/", x_forwarded_prefix=prefix))["status"] == 400
    with pytest.raises(GymError, match="path prefix"):
        Proxies.parse(prefix)


@pytest.mark.parametrize("trusted", ["*", "proxy.example.org", "0.0.0.0/0", "::/0", "10.0.0.300"])
def test_a_trusted_proxy_is_an_address_or_a_network(trusted: str) -> None:
    with pytest.raises(GymError, match="address"):
        Proxies.parse("", [trusted])
