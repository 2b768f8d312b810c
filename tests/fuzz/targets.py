"""Fuzz targets: parsers of untrusted data, each as a function of bytes, with valid inputs as seeds for mutations.

A target may raise ``GymError`` and nothing else. The seeds are golden files and the output of our own writers. Targets
import the project when they are called, so that the fuzzer can instrument it.
"""

from __future__ import annotations

import json
import random
import struct
from pathlib import Path
from typing import Any

import yaml

from tests.fuzz import hub_replies
from tests.fuzz.structure import changed, mutate_json, mutate_json_lines, mutate_safetensors
from tests.fuzz.target import Target, as_file, scratch

ROOT = Path(__file__).parents[2]
GOLDEN = ROOT / "tests" / "unit" / "golden"


def read_delta(data: bytes) -> None:
    from gym_fed.delta.file import DeltaFile

    with DeltaFile.open(as_file("in.gymdelta", data), added_tokens=True) as delta:
        assert delta.norm() >= 0.0
        for name in delta.added_rows.names if delta.added_rows is not None else ():
            assert bool(delta.decode_added(name).isfinite().all()), name
        for name in delta.names:
            assert bool(delta.decode(name).isfinite().all()), name


def delta_seeds() -> list[bytes]:
    return [path.read_bytes() for path in sorted(GOLDEN.glob("*.gymdelta"))]


def read_delta_manifest(data: bytes) -> None:
    from gym_fed.delta.manifest import Manifest

    manifest = Manifest.parse(_text(data), max_tensors=1000)
    Manifest.parse(manifest.to_json(), max_tensors=1000).require_canonical(manifest.to_json())


def delta_manifest_seeds() -> list[bytes]:
    headers = [json.loads(data[8 : 8 + struct.unpack("<Q", data[:8])[0]]) for data in delta_seeds()]
    return [next(iter(header["__metadata__"].values())).encode() for header in headers]


def read_update_manifest(data: bytes) -> None:
    from gym_fed.trust.identity.manifest import UpdateManifest

    assert len(UpdateManifest.parse(_text(data)).digest) == 64


def update_manifest_seeds() -> list[bytes]:
    from gym_fed.trust.identity.manifest import UpdateManifest

    manifest = UpdateManifest(
        contributor="c" + "a" * 32,
        server="s" + "b" * 16,
        task="1",
        server_round=1,
        base_digest="sha256:" + "c" * 64,
        delta_sha256="d" * 64,
        delta_bytes=1,
        nonce="e" * 32,
        issued_at_seconds=1,
        expires_at_seconds=2,
        num_examples=1,
        metrics={"loss": 1.5},
    )
    return [manifest.model_dump_json().encode()]


def read_safetensors(data: bytes) -> None:
    from gym_fed.base.imports.stored import StoredTensors
    from gym_fed.base.modeling.tensor_files import tensor_shapes

    folder = as_file("weights/model.safetensors", data).parent
    tensor_shapes(folder)
    with StoredTensors(folder) as tensors:
        for name in tensors:
            assert list(tensors[name].shape) == tensors.shape(name)


def safetensors_seeds() -> list[bytes]:
    import torch
    from safetensors.torch import save

    tensors = {"a.weight": torch.ones(2, 3), "b": torch.ones(4, dtype=torch.float16), "c": torch.zeros(0, 2)}
    return [save(tensors, metadata={"format": "pt"}), save({"x": torch.ones((), dtype=torch.int64)})]


def read_gguf(data: bytes) -> None:
    from gym_fed.base.imports.gguf.reader import GgufImporter

    file, importer = as_file("in.gguf", data), GgufImporter()
    importer.require_header(file)
    importer.describe(file)
    importer.bytes_needed(file)


def gguf_seeds() -> list[bytes]:
    import gguf
    import numpy as np

    file = scratch() / "seed.gguf"
    writer = gguf.GGUFWriter(None, "llama")
    numbers = {
        "context_length": 64,
        "embedding_length": 8,
        "block_count": 1,
        "feed_forward_length": 16,
        "attention.head_count": 2,
        "attention.head_count_kv": 2,
    }
    for key, value in numbers.items():
        writer.add_uint32(f"llama.{key}", value)
    writer.add_float32("llama.attention.layer_norm_rms_epsilon", 1e-5)
    writer.add_string("general.name", "seed")
    writer.add_array("tokenizer.ggml.tokens", ["<unk>", "a", "b", "c"])
    writer.add_array("tokenizer.ggml.token_type", [2, 1, 1, 1])
    writer.add_string("tokenizer.ggml.model", "gpt2")
    for name, shape in {"token_embd.weight": (4, 8), "output_norm.weight": (8,)}.items():
        writer.add_tensor(name, np.ones(shape, dtype=np.float32))
    for part in ("attn_q", "attn_k", "attn_v", "attn_output"):
        writer.add_tensor(f"blk.0.{part}.weight", np.ones((8, 8), dtype=np.float32))
    for part, shape in {"ffn_gate": (16, 8), "ffn_up": (16, 8), "ffn_down": (8, 16)}.items():
        writer.add_tensor(f"blk.0.{part}.weight", np.ones(shape, dtype=np.float32))
    for part in ("attn_norm", "ffn_norm"):
        writer.add_tensor(f"blk.0.{part}.weight", np.ones(8, dtype=np.float32))
    writer.write_header_to_file(file)
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return [file.read_bytes()]


def read_packed(data: bytes) -> None:
    """AWQ and GPTQ: the JSON of ``quantization_config``, a zero byte, and the weights."""
    from gym_fed.base.imports.quantised import METHODS, QuantisedImporter, plain_tensors
    from gym_fed.base.imports.stored import StoredTensors
    from gym_fed.core.json_files import read_object

    config, _, weights = data.partition(b"\0")
    folder = as_file("packed/model.safetensors", weights).parent
    as_file("packed/config.json", b'{"quantization_config": ' + config + b"}")
    importer = QuantisedImporter()
    if not importer.takes(folder):
        return
    importer.describe(folder)
    importer.require_header(folder)
    importer.bytes_needed(folder)
    section = read_object(folder / "config.json")["quantization_config"]
    assert section["quant_method"] in METHODS
    with StoredTensors(folder) as tensors:
        for _name, value in plain_tensors(tensors, section):
            assert value.numel() < 1 << 24


def mutate_packed(data: bytes, choice: random.Random) -> bytes:
    config, _, weights = data.partition(b"\0")
    if choice.randrange(2):
        return mutate_json(config, choice) + b"\0" + weights
    return config + b"\0" + mutate_safetensors(weights, choice)


def packed_seeds() -> list[bytes]:
    import torch
    from safetensors.torch import save

    from tests.support.packed_weights import packed_layers

    sections = {
        "awq": {"quant_method": "awq", "bits": 4, "group_size": 8, "version": "gemm", "zero_point": True},
        "gptq": {"quant_method": "gptq", "bits": 4, "group_size": 8, "desc_act": False, "sym": False},
    }
    found = []
    for method, section in sections.items():
        layers, _ = packed_layers({"q_proj.weight": torch.randn(8, 16), "n": torch.ones(2)}, method, 8)
        weights = save({name: value.contiguous() for name, value in layers.items()})
        found.append(json.dumps(section).encode() + b"\0" + weights)
    return found


def read_tokenizer(data: bytes) -> None:
    from gym_fed.base.models import load_tokenizer
    from gym_fed.core.tokenizer_errors import tokenizer_errors

    folder = as_file("tokenizer/tokenizer.json", data).parent
    as_file("tokenizer/tokenizer_config.json", b'{"tokenizer_class": "PreTrainedTokenizerFast"}')
    as_file("tokenizer/config.json", b'{"model_type": "llama"}')
    tokenizer = load_tokenizer(str(folder))
    with tokenizer_errors(tokenizer):
        tokenizer.decode(tokenizer("Some words, 12 numbers.\n")["input_ids"])


def tokenizer_seeds() -> list[bytes]:
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers

    vocabulary = {"<unk>": 0, "a": 1, "b": 2, "ab": 3, "Some": 4}
    made = Tokenizer(models.BPE(vocab=vocabulary, merges=[("a", "b")], unk_token="<unk>"))
    made.normalizer = normalizers.NFC()
    made.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Whitespace(), pre_tokenizers.Digits()])
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens(["<s>"])
    words = Tokenizer(models.WordLevel(vocab=vocabulary, unk_token="<unk>"))
    return [made.to_str().encode(), words.to_str().encode()]


def read_rows(data: bytes) -> None:
    """Parse a file of rows; the first byte of the input selects its suffix."""
    from gym_fed.data.reading import load_rows

    suffix = _SUFFIXES[data[0] % len(_SUFFIXES)] if data else "jsonl"
    load_rows(as_file(f"rows.{suffix}", data[1:]))


def mutate_rows(data: bytes, choice: random.Random) -> bytes:
    suffix = _SUFFIXES[data[0] % len(_SUFFIXES)] if data else "jsonl"
    mutate = {"jsonl": mutate_json_lines, "json": mutate_json}.get(suffix)
    return data if mutate is None else data[:1] + mutate(data[1:], choice)


_SUFFIXES = ("jsonl", "json", "csv", "tsv", "txt", "parquet", "jsonl.gz")


def rows_seeds() -> list[bytes]:
    import gzip
    import io

    import pyarrow as pa
    import pyarrow.parquet as pq

    chat = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}
    lines = json.dumps(chat) + "\n" + json.dumps({"messages": chat["messages"], "tools": None}) + "\n"
    table = io.BytesIO()
    pq.write_table(pa.table({"prompt": ["a", "b"], "completion": ["c", "d"]}), table)
    contents = {
        "jsonl": lines.encode(),
        "json": json.dumps([{"instruction": "a", "input": "", "output": "b"}]).encode(),
        "csv": b'prompt,chosen,rejected\n"a, b",c,d\n',
        "tsv": b"prompt\tcompletion\na\tb\n",
        "txt": b"some text\nof two lines\n",
        "parquet": table.getvalue(),
        "jsonl.gz": gzip.compress(lines.encode(), mtime=0),
    }
    return [bytes([_SUFFIXES.index(suffix)]) + content for suffix, content in contents.items()]


def read_hub_yaml(data: bytes) -> None:
    from gym_fed.config.hub.server import ServerConfig
    from gym_fed.config.yaml.file import load_config

    load_config(as_file("hub.yaml", data), ServerConfig)


def hub_yaml_seeds() -> list[bytes]:
    """A short config, and one with every option."""
    from gym_fed.config.hub.server import ServerConfig

    short = b"name: hub\nlisten: 127.0.0.1:9443\nenrolment: {policy: open}\nrounds:\n  min_contributors: 3\n"
    whole = ServerConfig().model_dump(mode="json", exclude_none=True)
    return [short, yaml.safe_dump(whole).encode()]


def read_run_yaml(data: bytes) -> None:
    """Parse run configs, in our format and LLaMA-Factory's."""
    from gym_fed.config.training_file import load_training_config

    load_training_config(as_file("run.yaml", data))


def run_yaml_seeds() -> list[bytes]:
    ours = (
        b"algorithm: sft\nmodel: gym-nano\ndata:\n  - path: rows.jsonl\nlearning_rate: 1.0e-4\nseed: &a 4\n"
    )
    theirs = b"stage: sft\nmodel_name_or_path: gym-nano\ndataset: rows.jsonl\nfinetuning_type: lora\nlora_rank: 8\n"
    return [ours, theirs, *(file.read_bytes() for file in sorted((ROOT / "configs").glob("nano-*.yaml")))]


def mutate_yaml(data: bytes, choice: random.Random) -> bytes:
    try:
        document = yaml.safe_load(data)
    except (yaml.YAMLError, ValueError, RecursionError):
        return data
    return yaml.safe_dump(changed(document, choice), allow_unicode=True).encode(
        "utf-8", errors="surrogatepass"
    )


def read_ledger(data: bytes) -> None:
    """Verify an export, and give its entries to the readers of verified ledgers."""
    from gym_client.agent.region import _SummedVersions
    from gym_client.audits.draws import Draws
    from gym_client.ledger.rewards import Tally
    from gym_client.mirror.follower import _PublicFacts

    from gym_fed.trust.identity.keys import server_id
    from gym_fed.trust.ledger.entries import Entry
    from gym_fed.trust.ledger.export import verify_file
    from gym_fed.trust.regions.links import RegionLinks
    from tests.fuzz import ledgers

    tally, links, facts = Tally(ledgers.key(1).contributor), RegionLinks(), _PublicFacts()
    visitors = (tally, links.add, facts, Draws(), _SummedVersions())
    entries: list[Entry] = []

    def visit(entry: Entry, body: dict[str, Any]) -> None:
        entries.append(entry)
        for visitor in visitors:
            visitor(entry, body)

    public_key, _ = verify_file(as_file("ledger.jsonl", data), None, visit)
    assert isinstance(tally.balance, int)
    links.compare(server_id(public_key), entries)
    for entry in entries:
        if entry.kind == "version":
            facts.objects(entry.body["digest"])


def ledger_seeds() -> list[bytes]:
    from tests.fuzz import ledgers

    return [ledgers.export()]


def mutate_ledger(data: bytes, choice: random.Random) -> bytes:
    from tests.fuzz import ledgers

    return ledgers.mutate_ledger(data, choice)


def read_backup(data: bytes) -> None:
    from gym_server.backup.backup import check_backup
    from gym_server.backup.place import MANIFEST

    place = scratch() / "place"
    as_file(f"place/snapshots/one/{MANIFEST}", data)
    as_file("place/snapshots/one/gym-server.yaml", b"")
    check_backup(str(place))


def backup_seeds() -> list[bytes]:
    from hashlib import sha256

    empty = sha256(b"").hexdigest()
    manifest = {
        "format": "gym-backup-2",
        "server": "s" + "0" * 16,
        "created_at": 1,
        "software_version": "0.2.0",
        "head": None,
        "files": {"gym-server.yaml": {"sha256": empty, "size_bytes": 0}},
        "objects": {},
    }
    return [json.dumps(manifest).encode()]


def read_invite(data: bytes) -> None:
    from gym_fed.trust.identity.login import format_invite, parse_invite

    text = _text(data)
    assert parse_invite(format_invite(parse_invite(text))) == parse_invite(text)


def invite_seeds() -> list[bytes]:
    return [f"gym://{host}:9443/{'a' * 64}/{'b' * 32}".encode() for host in ("hub.example", "[::1]")]


def _text(data: bytes) -> str:
    """Decode an input as the wire or the shell would: both reject invalid UTF-8."""
    return data.decode("utf-8", errors="replace")


TARGETS: dict[str, Target] = {
    "delta": Target(delta_seeds, read_delta, ("gym_fed.delta", "gym_quant"), mutate=mutate_safetensors),
    "delta_manifest": Target(
        delta_manifest_seeds, read_delta_manifest, ("gym_fed.delta",), mutate=mutate_json
    ),
    "update_manifest": Target(
        update_manifest_seeds, read_update_manifest, ("gym_fed.trust.identity",), mutate=mutate_json
    ),
    "safetensors": Target(
        safetensors_seeds,
        read_safetensors,
        ("gym_fed.base.imports.stored", "gym_fed.base.modeling.tensor_files"),
        mutate=mutate_safetensors,
    ),
    "gguf": Target(gguf_seeds, read_gguf, ("gym_fed.base.imports",)),
    "awq_gptq": Target(
        packed_seeds, read_packed, ("gym_fed.base.imports", "gym_fed.core.json_files"), mutate=mutate_packed
    ),
    "tokenizer": Target(
        tokenizer_seeds, read_tokenizer, ("gym_fed.base.models", "gym_fed.base.modeling"), mutate=mutate_json
    ),
    "rows": Target(rows_seeds, read_rows, ("gym_fed.data",), mutate=mutate_rows),
    "hub_yaml": Target(hub_yaml_seeds, read_hub_yaml, ("gym_fed.config", "yaml"), mutate=mutate_yaml),
    "run_yaml": Target(run_yaml_seeds, read_run_yaml, ("gym_fed.config", "yaml"), mutate=mutate_yaml),
    "ledger": Target(
        ledger_seeds,
        read_ledger,
        ("gym_fed.trust", "gym_client.ledger", "gym_client.audits"),
        max_bytes=1 << 16,
        mutate=mutate_ledger,
    ),
    "backup": Target(
        backup_seeds, read_backup, ("gym_server.backup", "gym_fed.trust.ledger"), mutate=mutate_json
    ),
    "invite": Target(invite_seeds, read_invite, ("gym_fed.trust.identity",)),
    **hub_replies.TARGETS,
}
