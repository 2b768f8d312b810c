"""A hub that is killed while a variant is pushed: the same push again ends it, with one entry in the ledger."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from gym_client.cli.join import enter
from gym_client.hub.transport import HubClient
from gym_client.identity.address import Address
from gym_client.identity.home import Home
from gym_client.identity.trust import establish
from gym_client.variants import pull_variant, push_variant, to_push

from gym_fed.base.models import load_model
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.delta.base import BaseSpec
from gym_fed.delta.writer import DeltaEntry, write_delta
from tests.support.hub import HubProcess
from tests.support.loopback_hub import manifest_of


@pytest.mark.slow  # two starts of a server for each line
@pytest.mark.parametrize("line", ["upload-chunk", "before-put-variant", "after-put-variant"])
def test_a_push_goes_on_after_the_hub_was_killed(tmp_path: Path, tiny_base: Path, line: str) -> None:
    import torch

    model = load_model(str(tiny_base)).model
    spec = BaseSpec.of(model, "tiny")
    entries = [
        DeltaEntry.of(n, torch.ones(shape), "dense", dtype="float32") for n, shape in spec.shapes.items()
    ]
    write_delta(tmp_path / "delta", entries, spec)
    hub = HubProcess(tmp_path / "hub", base_model=str(tiny_base)).start(failpoints=line)
    home, address = Home.open(tmp_path / "home"), Address.parse(hub.address)
    try:
        with HubClient(home, address, establish(home, address, hub.fingerprint, lambda _: False)) as client:
            enter(client, "me", "")
            said = manifest_of(tmp_path / "delta", base_digest=spec.digest)
            with pytest.raises(GymError) as caught:
                push_variant(client, tmp_path / "delta", to_push(client, said))
            assert caught.value.code is ErrorCode.UNAVAILABLE
            hub.wait_killed()
            hub.start()
            client.check_key()
            later = said.model_copy(update={"issued_at": said.issued_at + 1})
            signed = to_push(client, later)
            push_variant(client, tmp_path / "delta", signed)
            found = pull_variant(client, "", "mine", tmp_path / "in")
            assert found.path.read_bytes() == (tmp_path / "delta").read_bytes()
        found = hub.ask("ledger", "show", "--kind", "variant")
        assert len(found) == 1, json.dumps(found)
        assert hub.ask("ledger", "verify")["variants"] == 1
    finally:
        hub.stop()
