"""The images of deploy/docker, built from Debian's packages, started under a read-only root and used."""

from __future__ import annotations

import json
import os
import signal
import ssl
import subprocess
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from tests.support.images import Container, Images, missing
from tests.support.ports import free_port
from tests.support.wait import SECONDS, until

if reason := missing():
    pytest.skip(reason, allow_module_level=True)
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(4 * 3600),
]  # it compiles the kernels, and installs torch four times

USER = 10001
HUB_BYTES = 900e6
PASSPHRASE = "a passphrase of the test"


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Images]:
    """A store of images; GYM_TEST_IMAGES names a folder that keeps it for the next run."""
    kept = os.environ.get("GYM_TEST_IMAGES")
    store = Images(Path(kept) if kept else tmp_path_factory.mktemp("images"))
    store.prepare(["client", "serve", "train"])
    yield store
    if not kept:
        store.close()


def owned(folder: Path) -> Path:
    """A new folder of the images' user, as a volume."""
    folder.mkdir()
    os.chown(folder, USER, USER)
    return folder


@contextmanager
def running(command: list[str], log: Path) -> Iterator[subprocess.Popen[bytes]]:
    with log.open("wb") as out:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT)
        try:
            yield process
        finally:
            # The death of its parent ends no process that has changed its user.
            for pid in descendants(process.pid):
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            process.kill()
            process.wait()


def done(command: list[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command, capture_output=True, text=True, timeout=3 * SECONDS, stdin=subprocess.DEVNULL
    )


def healthy(command: list[str], server: subprocess.Popen[bytes], log: Path) -> bool:
    assert server.poll() is None, log.read_text()[-4000:]
    return done(command).returncode == 0


def inside(server: subprocess.Popen[bytes]) -> list[tuple[str, int, int]]:
    """Name, user and peak memory in bytes of every process below ``unshare``."""
    found, waiting = [], [server.pid]
    while waiting:
        pid = waiting.pop()
        waiting += map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split())
        facts = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
        peak = int(facts.get("VmHWM", "0").split()[0]) * 1024
        found.append((facts["Name"].strip(), int(facts["Uid"].split()[0]), peak))
    return found


def check(image: dict[str, Any]) -> None:
    config = image["Config"]
    assert config["User"] == "10001:10001"
    assert config["Entrypoint"] == ["tini", "--", "with-secrets"]
    assert "/data" in config["Volumes"]
    assert not any("PASS" in line or "SECRET" in line for line in config["Env"])


def try_to_write(container: Container, volumes: dict[Path, str]) -> None:
    for path in ("/x", "/opt/gym/x", "/usr/bin/x", "/etc/x"):
        assert done(container.command("touch", path, volumes=volumes)).returncode != 0, path
    assert done(container.command("touch", "/data/x", "/tmp/x", volumes=volumes)).returncode == 0
    assert done(container.command("pip", "--version", volumes=volumes)).returncode != 0
    assert done(container.command("gcc", "--version", volumes=volumes)).returncode != 0


def test_a_hub_and_a_contributor_in_containers_make_a_round(images: Images, tmp_path: Path) -> None:
    hub_image, client_image = images.build("hub"), images.build("client")
    facts = images.facts(hub_image)
    print(
        f"hub image: {facts['Size'] / 1e6:.0f} MB, client image: {images.facts(client_image)['Size'] / 1e6:.0f} MB"
    )
    check(facts)
    check(images.facts(client_image))
    assert facts["Size"] < HUB_BYTES
    assert facts["Config"]["Healthcheck"]["Test"] == ["CMD", "gym-server", "health"]

    port, pages = free_port(), free_port()
    config = tmp_path / "gym-server.yaml"
    config.write_text(
        f"listen: 0.0.0.0:{port}\nadvertise: 127.0.0.1:{port}\nenrolment: {{policy: open}}\n"
        f"dashboard: {{listen: '0.0.0.0:{pages}'}}\n"
        "rounds: {num_rounds: 1, min_contributors: 1}\nsoup: {num_malicious_nodes: 0}\n"
        "recipe: {max_steps: 2}\nlimits: {enrolment_work_bits: 4}\n"
    )
    secret = tmp_path / "passphrase"
    secret.write_text(PASSPHRASE + "\n")
    data, log = owned(tmp_path / "hub"), tmp_path / "hub.log"
    volumes = {data: "/data", config: "/etc/gym/gym-server.yaml", secret: "/run/secrets/passphrase"}
    environment = {"GYM_SERVER_PASSPHRASE_FILE": "/run/secrets/passphrase"}
    with images.container(hub_image) as hub, images.container(client_image) as client:
        try_to_write(hub, volumes)
        with running(hub.command(volumes=volumes, environment=environment), log) as server:
            probe = hub.command("gym-server", "health", volumes=volumes)
            until(lambda: healthy(probe, server, log), "the hub is healthy", 3 * SECONDS)
            home = {owned(tmp_path / "client"): "/data"}
            words = [
                "gym-client",
                "join",
                "--server",
                f"127.0.0.1:{port}",
                "--yes",
                "--rounds",
                "1",
                "--device",
                "cpu",
            ]
            joined = done(client.command(*words, volumes=home))
            assert joined.returncode == 0, joined.stderr[-4000:]
            shown = done(
                hub.command("gym-server", "rounds", "--json", volumes=volumes, environment=environment)
            )
            assert [one["state"] for one in json.loads(shown.stdout)] == ["committed"], shown.stderr
            assert "gym_hub_model_version 1.0" in metrics(
                pages, (data / "hub" / "metrics.key").read_text().strip()
            )
            python = [one for one in inside(server) if one[0].startswith("gym-server")]
            assert [user for _, user, _ in python] == [USER], inside(server)
            print(f"hub: peak memory {python[0][2] / 2**20:.0f} MiB")
            tini = next(pid for pid in descendants(server.pid) if comm(pid) == "tini")
            os.kill(tini, signal.SIGTERM)
            assert server.wait(SECONDS) == 0, log.read_text()[-4000:]
        assert "ENCRYPTED" in (data / "hub" / "keys" / "ledger.pem").read_text()
        assert PASSPHRASE not in log.read_text()
        locked = done(hub.command("gym-server", "status", volumes=volumes))
        assert "GYM_SERVER_PASSPHRASE" in locked.stderr


def metrics(port: int, key: str) -> str:
    context = ssl._create_unverified_context()  # on loopback, and the test is about the key
    request = urllib.request.Request(
        f"https://127.0.0.1:{port}/metrics", headers={"Authorization": f"Bearer {key}"}
    )
    with urllib.request.urlopen(request, context=context, timeout=SECONDS) as reply:
        return str(reply.read().decode())


def comm(pid: int) -> str:
    return Path(f"/proc/{pid}/comm").read_text().strip()


def descendants(pid: int) -> list[int]:
    found, waiting = [], [pid]
    while waiting:
        one = waiting.pop()
        try:
            below = [int(word) for word in Path(f"/proc/{one}/task/{one}/children").read_text().split()]
        except FileNotFoundError:  # it has ended
            continue
        found += below
        waiting += below
    return found


def test_an_api_in_a_container_answers_those_with_a_key(images: Images, tmp_path: Path) -> None:
    name = images.build("api")
    check(images.facts(name))
    port = free_port()
    config = tmp_path / "serving.yaml"
    config.write_text(f"host: 0.0.0.0\nport: {port}\nvariants: null\napi_keys: /data/api_keys.json\n")
    data, log = owned(tmp_path / "api"), tmp_path / "api.log"
    volumes = {data: "/data", config: "/etc/gym/serving.yaml"}
    with images.container(name) as api:
        try_to_write(api, volumes)
        words = ["gym", "api", "keys", "add", "ada", "--file", "/data/api_keys.json"]
        key = done(api.command(*words, volumes=volumes)).stdout.strip()
        assert key
        environment = {"GYM_METRICS_KEY_FILE": "/data/metrics.key"}
        with running(api.command(volumes=volumes, environment=environment), log) as server:
            health = api.config["Healthcheck"]["Test"][1:]
            probe = api.command(*health, volumes=volumes)
            until(lambda: healthy(probe, server, log), "the server is healthy", 3 * SECONDS)
            body = json.dumps(
                {"model": "gym-nano", "max_tokens": 4, "messages": [{"role": "user", "content": "hi"}]}
            )
            url = f"http://127.0.0.1:{port}"
            headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
            request = urllib.request.Request(f"{url}/v1/chat/completions", body.encode(), headers)
            with urllib.request.urlopen(request, timeout=SECONDS) as reply:
                assert json.load(reply)["choices"][0]["message"]["role"] == "assistant"
            metrics_key = (data / "metrics.key").read_text().strip()
            scrape = urllib.request.Request(
                f"{url}/metrics", headers={"Authorization": f"Bearer {metrics_key}"}
            )
            with urllib.request.urlopen(scrape, timeout=SECONDS) as reply:
                assert "gym_engine_queued" in reply.read().decode()
            served = [one for one in inside(server) if one[0] == "gym"]
            assert [user for _, user, _ in served] == [USER], inside(server)
            print(f"api: peak memory {served[0][2] / 2**20:.0f} MiB")


def test_the_workbench_in_a_container_asks_for_a_key(images: Images, tmp_path: Path) -> None:
    name = images.build("webui")
    check(images.facts(name))
    data, log, port = owned(tmp_path / "webui"), tmp_path / "webui.log", free_port()
    with images.container(name) as webui:
        volumes = {data: "/data"}
        key = done(webui.command("gym", "webui", "keys", "add", "ada", volumes=volumes)).stdout.strip()
        assert key
        words = ["gym", "webui", "serve", "--host", "0.0.0.0", "--no-open", "--port", str(port)]
        with running(webui.command(*words, volumes=volumes), log) as server:
            opener = urllib.request.build_opener(urllib.request.HTTPCookieProcessor())

            def status(path: str, body: dict[str, str] | None = None) -> int:
                assert server.poll() is None, log.read_text()[-4000:]
                content = None if body is None else json.dumps(body).encode()
                url, kind = f"http://127.0.0.1:{port}/api/v1/{path}", {"Content-Type": "application/json"}
                try:
                    with opener.open(urllib.request.Request(url, content, kind), timeout=SECONDS) as reply:
                        return int(reply.status)
                except urllib.error.HTTPError as refused:
                    return refused.code
                except OSError:  # it does not listen yet
                    return 0

            assert until(lambda: status("runs"), "the workbench answers", 3 * SECONDS) == 401
            assert status("login", {"key": f"not {key}"}) == 401
            assert status("login", {"key": key}) == 200
            assert status("runs") == 200


@pytest.mark.parametrize("target", ["hub", "api"])
def test_a_start_without_an_address_or_a_config_is_refused_with_the_remedy(
    target: str, images: Images, tmp_path: Path
) -> None:
    with images.container(images.build(target)) as container:
        refused = done(container.command(volumes={owned(tmp_path / "data"): "/data"}))
        assert refused.returncode == 78
        assert "/etc/gym/" in refused.stderr
