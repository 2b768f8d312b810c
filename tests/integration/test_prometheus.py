"""A real Prometheus reads a hub of real contributors and an API: every panel is answered, and alerts fire for real."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import httpx
import pytest

from gym_fed.serving.http.keys import KeyFile
from gym_fed.trust.identity.tls import TLS_NAME
from gym_fed.trust.wire.service import HubStub
from gym_fed.trust.wire.v1 import hub_pb2 as pb
from tests.support.chromium import chromium, why_not
from tests.support.federation import Federation
from tests.support.hub import gym_server
from tests.support.nano_store import nano_store
from tests.support.ports import free_port
from tests.support.private_hub import PRIVATE
from tests.support.prometheus import PrometheusServer, needs_prometheus
from tests.support.wait import SECONDS, until
from tests.support.warm import WarmProcess
from tools.dashboards.__main__ import DASHBOARDS, ROOT

pytestmark = [pytest.mark.slow, needs_prometheus]

HUB: dict[str, Any] = {
    **PRIVATE,
    "rounds": {"num_rounds": 500, "min_contributors": 2, "deadline_seconds": 240, "lease_seconds": 20},
    "privacy": {"noise_multiplier": 8.0, "clipping_norm": 0.5, "epsilon": 50.0},
    "gate": {**PRIVATE["gate"], "heldout": "heldout.jsonl", "max_examples": 4, "max_loss_increase": 100.0},
}
"""With privacy and held-out rows, so that no panel is empty."""
SERVING = """
base: gym-nano
variants: store
api_keys: keys.json
usage_log: usage.jsonl
device: cpu
num_threads: 1
filter: {input: true, output: true, package_rules: false, rules: [rules.txt], text: refused}
"""
SHOWN = ("gym_hub_heldout_loss", "gym_hub_recent_updates", "gym_engine_first_token_seconds_bucket")
"""Expressions whose graphs are kept as pictures."""


def row(text: str) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}, {"role": "assistant", "content": text * 2}]}


@pytest.fixture(scope="module")
def federation(tmp_path_factory: pytest.TempPathFactory, tiny_base: Path) -> Iterator[Any]:
    """A hub with a dashboard, two contributors at work, and the key of its metrics."""
    folder = tmp_path_factory.mktemp("federation")
    listen = f"127.0.0.1:{free_port()}"
    federation = Federation(folder, tiny_base, **HUB, dashboard={"listen": listen})
    hub = federation.hub
    (hub.folder / "heldout.jsonl").write_text("".join(json.dumps(row(f"x{i}")) + "\n" for i in range(4)))
    key = gym_server("dashboard-keys", "add", "prometheus", "--metrics", "--dir", str(hub.folder))["key"]
    try:
        hub.start()
        for name in ("ann", "bob"):
            federation.join(name)
        yield SimpleNamespace(hub=hub, key=key, listen=listen)
    finally:
        federation.close()


@pytest.fixture(scope="module")
def api(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """`gym api` with a variant, a filter and a usage log, after an answer and a refusal."""
    folder = tmp_path_factory.mktemp("api")
    owners = nano_store(folder / "store", ["ann"])
    (folder / "serving.yaml").write_text(SERVING)
    (folder / "rules.txt").write_text("[weapons]\npipe bomb\n")
    keys = KeyFile(folder / "keys.json")
    ann = keys.add("ann", owners=(owners["ann"],))
    watcher = keys.add("watcher", base=False, metrics=True)
    with (folder / "said").open("w") as said:
        process = WarmProcess(
            ["gym", "api", "serving.yaml", "--port", "0", "--json"],
            cwd=folder,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            stdout=-1,
            stderr=said,
        )
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line, (folder / "said").read_text()
        url = json.loads(line)["url"]

        def ask(text: str) -> int:
            body = {
                "model": "gym-nano:ann",
                "messages": [{"role": "user", "content": text}],
                "max_tokens": 8,
            }
            headers = {"Authorization": f"Bearer {ann}"}
            return httpx.post(
                f"{url}/chat/completions", json=body, headers=headers, timeout=SECONDS
            ).status_code

        assert ask("Reverse: abc") == 200
        ask("Take a pipe bomb, and run.")
        yield SimpleNamespace(url=url, key=watcher, ask=ask, process=process)
    finally:
        process.kill()


@pytest.fixture(scope="module")
def prometheus(
    federation: Any, api: Any, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[PrometheusServer]:
    """Prometheus over both, with the rules of ``deploy/``, whose waits are left out."""
    folder = tmp_path_factory.mktemp("prometheus")
    text = (ROOT / "deploy/prometheus/rules.yml").read_text()
    (folder / "rules.yml").write_text(re.sub(r"for: \w+", "for: 0s", text))
    targets = {
        "gym-hub": (federation.listen, federation.key),
        "gym-api": (httpx.URL(api.url).netloc.decode(), api.key),
    }
    jobs = [
        {
            "job_name": job,
            "authorization": {"credentials": key},
            "static_configs": [{"targets": [target]}],
        }
        for job, (target, key) in targets.items()
    ]
    server = PrometheusServer(folder / "server", jobs, folder / "rules.yml")
    yield server
    server.close()


def refuse_a_call(hub: Any) -> None:
    """A call without a session, which a hub refuses."""
    pem = (hub.folder / "keys" / "tls.crt").read_bytes()
    options = [("grpc.ssl_target_name_override", TLS_NAME)]
    channel = grpc.secure_channel(hub.address, grpc.ssl_channel_credentials(pem), options)
    with channel, pytest.raises(grpc.RpcError):
        HubStub(channel).Account(pb.AccountRequest(), timeout=SECONDS)


def test_every_panel_is_answered_and_alerts_fire_for_real(
    federation: Any, api: Any, prometheus: PrometheusServer
) -> None:
    hub = federation.hub
    until(lambda: prometheus.targets() == {"gym-hub": "up", "gym-api": "up"}, "both targets are up")
    refuse_a_call(hub)
    hub.wait_for("two versions", lambda: prometheus.query("gym_hub_model_version >= 2"), 2 * SECONDS)
    unanswered: list[str] = []

    def all_answered() -> bool:
        api.ask("Reverse: abc")
        unanswered[:] = [
            query
            for _, panels in DASHBOARDS.values()
            for panel in panels
            for query in panel.queries.values()
            if not prometheus.query(query)
        ]
        return not unanswered

    try:
        until(all_answered, "every panel is answered")
    except AssertionError:
        pytest.fail(f"no series for {unanswered}")
    until(lambda: prometheus.alerts().get("BackupOld") == "firing", "there is no backup")
    assert not {"DiskBelowReserve", "RoundStalled"} & prometheus.alerts().keys()
    take_pictures(prometheus)

    gym_server(
        "backup", "--to", str(hub.folder.parent / "backup"), "--include-plain-keys", "--dir", str(hub.folder)
    )
    until(lambda: not prometheus.query("gym_hub_backup_timestamp_seconds == 0"), "the backup is seen")
    until(lambda: "BackupOld" not in prometheus.alerts(), "the alert about backups ends")

    assert hub.stop() == 0
    until(lambda: prometheus.alerts().get("HubDown") == "firing", "the hub is down")
    hub.configure({"storage": {"reserve_bytes": 1 << 60}, "rounds": {"deadline_seconds": 1}})
    hub.start()
    for name in ("DiskBelowReserve", "RoundStalled"):
        until(lambda name=name: prometheus.alerts().get(name) == "firing", name)  # type: ignore[misc]
    until(lambda: "HubDown" not in prometheus.alerts(), "the hub is up")
    api.process.kill()
    until(lambda: prometheus.alerts().get("ApiDown") == "firing", "the API is down")


def take_pictures(prometheus: PrometheusServer) -> None:
    """Keep graphs of a few expressions in build/, for people; nothing is compared."""
    if why_not():
        return
    folder = ROOT / "build" / "prometheus"
    folder.mkdir(parents=True, exist_ok=True)
    with chromium() as browser:
        page = browser.new_page(viewport={"width": 1200, "height": 800})
        for name in SHOWN:
            query = str(httpx.QueryParams({"g0.expr": name, "g0.tab": "0", "g0.range_input": "10m"}))
            page.goto(f"{prometheus.url}/classic/graph?{query}")
            page.wait_for_load_state("networkidle")
            page.screenshot(path=folder / f"{name}.png")
