"""A contributor without the base joins a real hub over TLS: offered, fetched, killed, resumed, damaged, declined."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.support.hub import HubProcess, gym_server, start_client
from tests.support.wait import SECONDS

CARD = "---\nlicense: apache-2.0\n---\n# A base of our own\n"
CONFIG = {
    "rounds": {"num_rounds": 1, "min_contributors": 1, "deadline_seconds": 600, "lease_seconds": 600},
    "soup": {"aggregator": "mean", "num_malicious_nodes": 0},
    "recipe": {"max_steps": 1, "max_length": 64, "per_device_train_batch_size": 2},
    "gate": {"screen_updates": False},
}


@pytest.fixture(scope="module")
def private_base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama of random weights in a folder that no contributor has: fourteen chunks of one mebibyte."""
    from transformers import LlamaConfig, LlamaForCausalLM

    from gym_fed.models import load_tokenizer

    torch.manual_seed(0)
    tokenizer = load_tokenizer("gym-nano")
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=256,
        intermediate_size=768,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=128,
        tie_word_embeddings=True,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    folder = tmp_path_factory.mktemp("private") / "our-base"
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    (folder / "README.md").write_text(CARD, encoding="utf-8")
    (folder / "training.log").write_text("the coordinator's own affair", encoding="utf-8")
    return folder


@pytest.fixture
def hub(tmp_path: Path, private_base: Path) -> Iterator[HubProcess]:
    """A hub on a copy of the base, so that a test may spoil it."""
    base = tmp_path / "our-base"
    shutil.copytree(private_base, base)
    found = HubProcess(tmp_path / "hub", CONFIG, str(base))
    yield found
    found.stop()


def bases_of(home: Path) -> list[Path]:
    return sorted((home / "bases").iterdir())


def part_of(home: Path) -> int:
    """Bytes of the file that is coming."""
    return sum(path.stat().st_size for path in (home / "bases").rglob("*.part"))


def wait(client: object, home: Path) -> int:
    status: int = client.wait(timeout=2 * SECONDS)  # type: ignore[attr-defined]
    return status


def log_of(home: Path) -> str:
    return (home / "client.log").read_text()


def test_a_base_is_fetched_over_kills_of_both_sides_and_its_contributor_is_merged(
    tmp_path: Path, hub: HubProcess
) -> None:
    home = tmp_path / "home"
    hub.start("--exit-when-done")
    size = (tmp_path / "our-base" / "model.safetensors").stat().st_size
    client = start_client(home, hub, failpoints="client-base-chunk:18")
    assert client.wait(timeout=2 * SECONDS) == -9, log_of(home)
    come = part_of(home)
    assert 0 < come < size, "killed within the weights"
    assert [path.suffix for path in bases_of(home)] == [".partial"]

    hub.kill()
    client = start_client(home, hub)
    hub.start("--exit-when-done")
    hub.wait_done()
    assert wait(client, home) == 0, log_of(home)
    (folder,) = bases_of(home)
    assert not folder.suffix
    for name in ("model.safetensors", "README.md", "tokenizer.json"):
        assert (folder / name).read_bytes() == (tmp_path / "our-base" / name).read_bytes()
    assert not (folder / "training.log").exists(), "only files of a base travel"
    down = json.loads((home / "traffic.json").read_text()).popitem()[1]["down"]
    assert down <= sum(path.stat().st_size for path in folder.iterdir()), (
        "what had come was not fetched again"
    )
    assert "apache-2.0" in log_of(home)
    (merged,) = gym_server("rounds", "--dir", str(hub.folder))
    assert merged["state"] == "committed"
