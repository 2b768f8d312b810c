"""A bad update never ends a round: a real hub refuses each by name and merges what the honest sent."""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from gym_fed.config.delta import CodecPolicy
from gym_fed.delta.base import BaseSpec
from gym_fed.delta.encode import encode_delta
from tests.support.contributor import RawContributor, random_delta
from tests.support.hub import HubProcess

HONEST, BAD = 5, 4


@pytest.fixture
def hub(tmp_path: Path, tiny_base: Path) -> Iterator[HubProcess]:
    config = {
        "rounds": {
            "num_rounds": 1,
            "min_contributors": HONEST,
            "deadline_seconds": 600,
            "lease_seconds": 600,
        },
        "soup": {"aggregator": "byzantine_robust", "num_malicious_nodes": 2},
    }
    found = HubProcess(tmp_path / "hub", config, str(tiny_base)).start()
    yield found
    found.stop()


def with_scale(delta: bytes, value: float) -> bytes:
    """The same file, but for one scale: the float32 section holds nothing else."""
    end = 8 + int.from_bytes(delta[:8], "little")
    header: dict[str, Any] = json.loads(delta[8:end])
    at = end + header["f32"]["data_offsets"][0]
    return delta[:at] + struct.pack("<f", value) + delta[at + 4 :]


def of_other_shapes(folder: Path, digest: str) -> bytes:
    base = {"model.embed_tokens.weight": torch.zeros(3, 5)}
    spec = BaseSpec("other", digest, {"model.embed_tokens.weight": (3, 5)})
    tuned = {name: tensor + 1.0 for name, tensor in base.items()}
    path = folder / "shapes.gymdelta"
    encode_delta(tuned, base, CodecPolicy(error_feedback=False), path, spec)
    return path.read_bytes()


def test_nan_infinity_wrong_shapes_and_a_broken_file_are_refused_and_the_round_goes_on(
    hub: HubProcess, tmp_path: Path, tiny_base: Path
) -> None:
    contributors = [RawContributor(hub.address, name=f"c{i}").enrol() for i in range(HONEST + BAD)]
    tasks = [one.next_task() for one in contributors]
    digest = contributors[0].status.base_digest
    deltas = [random_delta(tmp_path, digest, seed, str(tiny_base)) for seed in range(HONEST + BAD)]
    bad = [
        with_scale(deltas[0], math.nan),
        with_scale(deltas[1], math.inf),
        deltas[2][:-50],
        of_other_shapes(tmp_path, digest),
    ]
    for contributor, task, delta in zip(contributors, tasks, bad, strict=False):
        receipt = contributor.contribute(delta, task)
        assert receipt["verdict"] == "refused"
        assert receipt["code"] in ("delta-invalid", "base-mismatch")
        assert receipt["reason"]
    for contributor, task, delta in list(zip(contributors, tasks, deltas, strict=True))[BAD:]:
        assert contributor.contribute(delta, task)["verdict"] == "admitted"
    rounds = hub.wait_for("commit", lambda: [r for r in hub.ask("rounds") if r["state"] == "committed"])
    verdicts = [update["verdict"] for update in rounds[0]["updates"]]
    assert (verdicts.count("merged"), verdicts.count("refused")) == (HONEST, BAD)
    for contributor in contributors:
        contributor.close()
