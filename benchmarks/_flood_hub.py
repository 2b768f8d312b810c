"""The hub of the floods: a real `gym-server run`, its base model, and ways to reach it."""

from __future__ import annotations

import json
import signal
import sqlite3
import subprocess
import sys
from pathlib import Path
from typing import Any

import grpc
import yaml
from gym_client.hub.transport import HubClient
from gym_client.identity.address import Address
from gym_client.identity.home import Home
from gym_client.identity.trust import establish

from gym_fed.trust.identity.tls import TLS_NAME
from gym_fed.trust.wire.limits import CHANNEL_OPTIONS

HONEST_HOST, FLOOD_HOST = "127.0.0.1", "[::1]"
"""The hub listens on both, and sees each caller under the address that it called."""
BIN = Path(sys.executable).parent


class HubUnderTest:
    """`gym-server run` on a folder of its own."""

    process: subprocess.Popen[str]
    """Set by ``start``."""

    def __init__(self, folder: Path, base: Path, quorum: int) -> None:
        self.folder = folder
        run = [str(BIN / "gym-server"), "init", "--dir", str(folder), "--enrolment", "open"]
        subprocess.run([*run, "--base", str(base)], check=True, stdout=subprocess.DEVNULL)
        self.path = folder / "gym-server.yaml"
        self.configure(
            listen="0.0.0.0:0",
            rounds={
                "num_rounds": 1000,
                "min_contributors": quorum,
                "deadline_seconds": 60,
                "lease_seconds": 5,
            },
            soup={"aggregator": "mean", "num_malicious_nodes": 0},
            admission={"norm_ratio": None},
        )

    def configure(self, **sections: Any) -> None:
        values = yaml.safe_load(self.path.read_text())
        for name, section in sections.items():
            values[name] = {**values.get(name, {}), **section} if isinstance(section, dict) else section
        self.path.write_text(yaml.safe_dump(values))

    def start(self) -> None:
        with open(self.folder / "log", "ab") as log:
            command = [str(BIN / "gym-server"), "run", "--dir", str(self.folder), "--json"]
            self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True)
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit((self.folder / "log").read_text()[-3000:])
        event = json.loads(line)
        self.port, self.fingerprint = event["port"], event["fingerprint"]
        self.configure(listen=f"0.0.0.0:{self.port}")

    def stop(self) -> None:
        self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()

    @property
    def rss_mb(self) -> float:
        for line in Path(f"/proc/{self.process.pid}/status").read_text().splitlines():
            if line.startswith("VmRSS:"):
                return int(line.split()[1]) / 1024
        raise AssertionError("no VmRSS")

    def committed(self) -> int:
        with sqlite3.connect(f"file:{self.folder}/hub.db?mode=ro", uri=True, timeout=30) as database:
            row = database.execute("SELECT count(*) FROM rounds WHERE state = 'committed'").fetchone()
        return int(row[0])


def make_base(folder: Path) -> Path:
    """A model of a few thousand random weights."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    from gym_fed.base.models import load_tokenizer

    torch.manual_seed(0)
    tokenizer = load_tokenizer("gym-nano")
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=16,
        intermediate_size=36,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        max_position_embeddings=128,
        tie_word_embeddings=True,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    Qwen3ForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def connected(port: int, fingerprint: str, home: Home, host: str = HONEST_HOST) -> HubClient:
    address = Address.parse(f"{host}:{port}")
    return HubClient(home, address, establish(home, address, fingerprint, lambda _: False))


def new_channel(kind: Any, address: str, pem: str) -> Any:
    """A channel with a connection of its own."""
    own = [
        *CHANNEL_OPTIONS,
        ("grpc.ssl_target_name_override", TLS_NAME),
        ("grpc.use_local_subchannel_pool", 1),
    ]
    return kind.secure_channel(address, grpc.ssl_channel_credentials(pem.encode()), options=own)
