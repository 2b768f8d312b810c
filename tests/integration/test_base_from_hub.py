"""A contributor without the base joins a real hub over TLS: offered, fetched, killed, resumed, damaged, declined."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from gym_fed.core.errors import ErrorCode
from tests.support.hub import HubProcess, gym_server, start_client
from tests.support.wait import SECONDS
from tests.support.warm import run

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

    from gym_fed.base.models import load_tokenizer

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


def log_of(home: Path) -> str:
    return (home / "client.log").read_text()


@pytest.mark.slow  # four starts of processes
def test_a_base_is_fetched_over_kills_of_both_sides_and_its_contributor_is_merged(
    tmp_path: Path, hub: HubProcess
) -> None:
    home, base = tmp_path / "home", tmp_path / "our-base"
    hub.start("--exit-when-done", failpoints="download-chunk:16")
    client = start_client(home, hub)
    hub.wait_killed()  # within the weights, which come last
    assert 0 < part_of(home) < (base / "model.safetensors").stat().st_size
    client.kill()
    client.wait()
    come = part_of(home)

    hub.start("--exit-when-done")
    client = start_client(home, hub, failpoints="client-base-chunk:4")
    assert client.wait(timeout=2 * SECONDS) == -signal.SIGKILL, log_of(home)
    assert part_of(home) >= come
    assert [path.suffix for path in bases_of(home)] == [".partial"]

    client = start_client(home, hub)
    hub.wait_done()
    assert client.wait(timeout=2 * SECONDS) == 0, log_of(home)
    (folder,) = bases_of(home)
    assert not folder.suffix
    for name in ("model.safetensors", "README.md", "tokenizer.json"):
        assert (folder / name).read_bytes() == (base / name).read_bytes()
    assert not (folder / "training.log").exists(), "only files of a base travel"
    assert "apache-2.0" in log_of(home)
    (merged,) = gym_server("rounds", "--dir", str(hub.folder))
    assert merged["state"] == "committed"


def test_a_hub_whose_file_changed_under_it_serves_nothing_that_is_used(
    tmp_path: Path, hub: HubProcess
) -> None:
    hub.start()
    weights = tmp_path / "our-base" / "model.safetensors"
    with weights.open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"\xff")
    client = start_client(tmp_path / "home", hub)
    assert client.wait(timeout=2 * SECONDS) == ErrorCode.HASH_MISMATCH.exit_code, log_of(tmp_path / "home")
    assert [path.suffix for path in bases_of(tmp_path / "home")] == [".partial"]
    assert not part_of(tmp_path / "home")


def test_without_a_yes_the_refusal_names_licence_bytes_and_what_to_pass(
    tmp_path: Path, hub: HubProcess
) -> None:
    hub.start()
    command = ["gym-client", "join", "--server", hub.address, "--fingerprint", hub.fingerprint, "--home"]
    home = tmp_path / "home"
    refused = run([*command, str(home)])
    assert refused.returncode == ErrorCode.USAGE.exit_code
    for words in ("apache-2.0", "13.9 MB", "--yes", "--base"):
        assert words in refused.stderr, refused.stderr
    assert not bases_of(home)
    other = run([*command, str(tmp_path / "other"), "--yes", "--base", "gym-nano"])
    assert other.returncode == ErrorCode.BASE_MISMATCH.exit_code
    assert "tensors differ" in other.stderr
