"""deploy/compose on a real Docker engine: every service starts, and a contributor and a client pass through them.

The images of the project are the real ones. Stand-ins for those of others are built from Debian's packages
(tests/support/stand_ins), since no registry is asked.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import yaml

from gym_fed.version import __version__
from tests.support import docker_engine
from tests.support.docker_engine import ComposeProject, DockerEngine
from tests.support.images import Images, missing, run
from tests.support.wait import SECONDS, until

if reason := missing() or docker_engine.why_not() or ("" if shutil.which("npm") else "not installed: npm"):
    pytest.skip(reason, allow_module_level=True)
pytestmark = [pytest.mark.slow, pytest.mark.timeout(4 * 3600)]  # it builds images

ROOT = Path(__file__).resolve().parents[2]
COMPOSE = yaml.safe_load((ROOT / "deploy" / "compose" / "compose.yaml").read_text())
STAND_INS = ROOT / "tests" / "support" / "stand_ins"
HOSTS = {"API_HOST": "api.localhost", "DASHBOARD_HOST": "hub.localhost", "GRAFANA_HOST": "grafana.localhost"}
ONCE = {"metrics-folders", "bucket"}
"""Services that end before others start."""


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DockerEngine]:
    """An engine with every image of the compose file; GYM_TEST_IMAGES names a folder that keeps what is built."""
    kept = os.environ.get("GYM_TEST_IMAGES")
    work = Path(kept) if kept else tmp_path_factory.mktemp("images")
    images = Images(work)
    images.prepare(["client", "serve", "train"])
    with tempfile.TemporaryDirectory(prefix="engine-", dir="/tmp") as folder:
        docker = DockerEngine(Path(folder))
        try:
            for name, built in _build_all(images, work).items():
                archive = Path(folder) / "image.tar"
                images.save(built, archive, name)
                docker.run("docker", "load", "-q", "-i", str(archive), seconds=3 * SECONDS)
                archive.unlink()
            yield docker
        finally:
            docker.close()
            if not kept:
                images.close()


def _build_all(images: Images, work: Path) -> dict[str, str]:
    """Build the images of the compose file, and return their names in the store by the file's names."""
    built = {f"gym-fed-{target}:{__version__}": images.build(target) for target in ("hub", "api")}
    context = work / "stand-ins"
    shutil.copytree(STAND_INS, context, dirs_exist_ok=True)
    run("npm", "install", "--silent", "--prefix", str(context / "s3rver"), "s3rver@3.7.1")
    for image in {one["image"] for one in COMPOSE["services"].values() if "build" not in one}:
        target = image.rpartition("/")[2].partition(":")[0]
        name = f"localhost/stand-in-{target}:test"
        built[image] = images.build_file(context / "Dockerfile", context, target, name)
    return built


@pytest.fixture
def project(engine: DockerEngine, tmp_path: Path) -> Iterator[ComposeProject]:
    """The services of the file, started as docs/deploy.md says, with a config for one contributor of this machine."""
    shutil.copytree(ROOT / "deploy", tmp_path / "deploy", ignore=shutil.ignore_patterns("secrets"))
    folder = tmp_path / "deploy" / "compose"
    config = folder / "gym-server.yaml"
    text = config.read_text()
    for old, new in {
        "hub.example.org:9443": "127.0.0.1:9443",
        "min_contributors: 3": "min_contributors: 1",
    }.items():
        assert old in text
        text = text.replace(old, new)
    config.write_text(f"{text}soup: {{num_malicious_nodes: 0}}\nrecipe: {{max_steps: 2}}\n")
    subprocess.run(["sh", "secrets.sh"], cwd=folder, check=True)
    services = ComposeProject(engine, folder, COMPOSE["name"])
    try:
        services("up", "-d", "--no-build", seconds=4 * SECONDS)
        yield services
    except AssertionError:
        print(services("logs", "--no-color", "--tail", "40"))
        raise
    finally:
        services("down", "-v")


def https(engine: DockerEngine, authority: Path, host: str, path: str, *options: str) -> str:
    """Return what a host of the proxy answers, and its status in a last line; its authority is Caddy's own."""
    words = ["curl", "-sS", "--cacert", str(authority), "--resolve", f"{host}:443:127.0.0.1", *options]
    return engine.run(*words, "-w", "\n%{http_code}", f"https://{host}{path}")


def until_serving(project: ComposeProject) -> None:
    """Wait until the long-lived services with a check are healthy, and look at those that end."""
    for service in ("db", "s3", "hub", "api"):
        until(partial(project.is_healthy, service), f"{service} is healthy", 3 * SECONDS)
    for service in ONCE:
        assert project.inspect(service, "{{.State.Status}} {{.State.ExitCode}}") == "exited 0"


def test_the_services_start_and_are_used(
    engine: DockerEngine, project: ComposeProject, tmp_path: Path
) -> None:
    until_serving(project)
    restarts = {name: project.inspect(name, "{{.RestartCount}}") for name in COMPOSE["services"]}
    assert {*restarts.values()} == {"0"}, restarts

    # Monitoring reads both, with the keys that they wrote.
    authority = tmp_path / "root.crt"
    authority.write_text(project("exec", "-T", "proxy", "cat", "/data/caddy/pki/authorities/local/root.crt"))
    password = (tmp_path / "deploy/compose/secrets/grafana-password").read_text()
    login = ["-u", f"admin:{password}"]
    found = https(engine, authority, HOSTS["GRAFANA_HOST"], "/api/search", *login)
    assert {one["uid"] for one in json.loads(found.splitlines()[0])} == {"gym-hub", "gym-api"}

    def up() -> dict[str, str]:
        path = "/api/datasources/proxy/uid/prometheus/api/v1/query?query=up"
        body, _ = https(engine, authority, HOSTS["GRAFANA_HOST"], path, *login).rsplit("\n", 1)
        return {one["metric"]["job"]: one["value"][1] for one in json.loads(body)["data"]["result"]}

    until(lambda: up() == {"gym-hub": "1", "gym-api": "1"}, "Prometheus reads the hub and the API")

    # The two commands of the page, and a client of the API through TLS.
    key = project(
        "exec", "-T", "api", "gym", "api", "keys", "add", "ada", "--file", "/data/api_keys.json"
    ).strip()
    body = {"model": "gym-nano", "max_tokens": 4, "messages": [{"role": "user", "content": "hi"}]}
    options = [
        "-H",
        f"Authorization: Bearer {key}",
        "-H",
        "Content-Type: application/json",
        "-d",
        json.dumps(body),
    ]
    answer = https(engine, authority, HOSTS["API_HOST"], "/v1/chat/completions", *options).rsplit("\n", 1)
    assert (answer[1], json.loads(answer[0])["object"]) == ("200", "chat.completion")
    assert https(engine, authority, HOSTS["API_HOST"], "/v1/models").rsplit("\n", 1)[1] == "401"
    assert https(engine, authority, HOSTS["DASHBOARD_HOST"], "/", "-L").rsplit("\n", 1)[1] in ("200", "401")

    invite = invited(project, "for Ada")
    contribute(engine, tmp_path / "ada", invite)
    assert [one["state"] for one in hub(project, "rounds")][:1] == ["committed"]
    hub(project, "check")

    # A crash of the hub and a restart of its database lose nothing.
    os.kill(int(project.inspect("hub", "{{.State.Pid}}")), signal.SIGKILL)
    until(lambda: project.inspect("hub", "{{.RestartCount}}") == "1", "the engine starts the hub again")
    project("restart", "db")
    until_serving(project)
    contribute(engine, tmp_path / "ben", invited(project, "for Ben"))
    assert [one["state"] for one in hub(project, "rounds")][:2] == ["committed"] * 2
    hub(project, "ledger", "verify")

    # Neither the engine's records nor the logs have a secret.
    secrets = [
        path.read_text()
        for path in (tmp_path / "deploy/compose/secrets").glob("*-*")
        if "access" not in path.name
    ]
    shown = project("logs", "--no-color") + "".join(
        project.inspect(name, "{{json .}}") for name in COMPOSE["services"]
    )
    assert [text for text in secrets if text in shown] == []

    # New containers on the old volumes continue.
    project("down")
    project("up", "-d", "--no-build", seconds=4 * SECONDS)
    until_serving(project)
    assert [one["state"] for one in hub(project, "rounds")][:2] == ["committed"] * 2


def hub(project: ComposeProject, *words: str) -> Any:
    """Return the JSON that a command of gym-server prints in the hub's container."""
    return json.loads(project("exec", "-T", "hub", "with-secrets", "gym-server", *words, "--json"))


def invited(project: ComposeProject, note: str) -> str:
    return str(hub(project, "invites", "create", "--note", note)["invite"])


def contribute(engine: DockerEngine, folder: Path, invite: str) -> None:
    """Let a contributor outside the containers take part in one round, through the published port."""
    program = str(Path(sys.executable).parent / "gym-client")
    words = ["env", f"GYM_INVITE={invite}", "OMP_NUM_THREADS=1", program, "join", "--home", str(folder)]
    engine.run(*words, "--yes", "--rounds", "1", "--device", "cpu", seconds=3 * SECONDS)
