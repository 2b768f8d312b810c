"""The dashboard beyond loopback serves the hub's own certificate, whether the keys are encrypted or not."""

from __future__ import annotations

import json
import ssl
import urllib.request
from pathlib import Path

import pytest
import yaml
from gym_server.cli.setup import HubChoices, init_hub
from gym_server.federation import PASSPHRASE_VARIABLE, Federation
from gym_server.store.database import Database
from gym_server.web.dashboard import Dashboard

from gym_fed.trust.identity.tls import fingerprint
from tests.support.loopback_hub import SPEC
from tests.support.wait import SECONDS

PASSPHRASE = b"a passphrase of the test"


@pytest.mark.parametrize("encrypted", [False, True], ids=["plain", "encrypted"])
def test_the_pages_answer_with_the_certificate_of_the_hub(
    encrypted: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "hub"
    init_hub(folder, HubChoices("described", "loopback", "open"), (lambda: PASSPHRASE) if encrypted else None)
    monkeypatch.setenv(PASSPHRASE_VARIABLE, PASSPHRASE.decode())
    config = {"base_model": "described", "enrolment": {"policy": "open"}}
    (folder / "gym-server.yaml").write_text(yaml.safe_dump(config))
    database = Database.open("sqlite:///hub.db", folder)
    database.set("base:described", json.dumps(SPEC.to_dict()))
    database.close()
    certificate = folder / "keys" / "tls.crt"
    with Federation.open(folder) as fed, Dashboard(fed, "0.0.0.0:0", public=True, is_running=True) as pages:
        pages.start()
        port = pages.url.rpartition(":")[2]
        context = ssl.create_default_context(cafile=certificate)
        context.check_hostname = False
        with urllib.request.urlopen(f"https://127.0.0.1:{port}/", context=context, timeout=SECONDS) as reply:
            assert reply.status == 200
        served = ssl.get_server_certificate(("127.0.0.1", int(port)))
    assert fingerprint(served.encode()) == fingerprint(certificate.read_bytes())
