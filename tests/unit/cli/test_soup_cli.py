"""`gym soup`: merging by every rule, what it shows, and what it refuses before anything is written."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import Result
from typer.testing import CliRunner

from gym_fed.base.models import load_model
from gym_fed.cli.main import app
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.core.registries import AGGREGATORS, METHODS, PRE_AGGREGATORS, SERVER_OPTIMIZERS
from gym_fed.delta.base import BaseSpec, model_tensors
from gym_fed.delta.file import DeltaFile
from gym_fed.delta.writer import DeltaEntry, write_delta
from gym_fed.evaluation import heldout_loss
from gym_fed.soup.gram import Needs

COUNT = 4
TEXT = '{"text": "to be or not to be, that is the question"}\n{"text": "whether it is nobler"}\n'


def gym(*words: object) -> Result:
    return CliRunner().invoke(app, ["soup", *(str(word) for word in words)])


def error_of(done: Result) -> GymError:
    assert isinstance(done.exception, GymError), done.output
    return done.exception


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, tiny_base: Path) -> Path:
    """Four updates of the tiny base, one of them a far-off malicious one; a text; statistics of each kind."""
    path = tmp_path_factory.mktemp("soup")
    base = model_tensors(load_model(str(tiny_base)).model)
    spec = BaseSpec.of(base, tiny_base.name)
    for index in range(COUNT):
        generator = torch.Generator().manual_seed(index)
        size = 1.0 if index == COUNT - 1 else 1e-2
        entries = [
            DeltaEntry.of(name, size * torch.randn(t.shape, generator=generator), "dense", dtype="float32")
            for name, t in base.items()
        ]
        write_delta(path / f"{index}.gymdelta", entries, spec)
    (path / "text.jsonl").write_text(TEXT)
    for kind in ("fisher", "moments"):
        done = gym(
            "statistics", tiny_base, "--data", path / "text.jsonl", "-o", path / f"{kind}.safetensors", "--kind", kind
        )  # fmt: skip
        assert done.exit_code == 0, done.exception
        assert kind in done.output
    return path


def honest(folder: Path) -> list[Path]:
    return [folder / f"{index}.gymdelta" for index in range(COUNT - 1)]


def merged(folder: Path, tiny_base: Path, tmp_path: Path, *words: object) -> dict[str, Any]:
    done = gym(
        "merge", *honest(folder), "-o", tmp_path / "soup.gymdelta", "--base", tiny_base, "--json", *words
    )
    assert done.exit_code == 0, done.exception
    reply: dict[str, Any] = json.loads(done.stdout)
    return reply


def needs_of(rule: str, folder: Path) -> list[object]:
    """What a rule wants beside the updates, as options."""
    if rule in AGGREGATORS.names():
        return ["--root", folder / "0.gymdelta"] if AGGREGATORS.type_of(rule).needs is Needs.ROOT else []
    method = METHODS.type_of(rule)
    options: list[object] = ["--heldout", folder / "text.jsonl"] if method.uses_score else []
    if method.statistics is not None:
        kind = "fisher" if "fisher" in method.statistics else "moments"
        options += ["--statistics", folder / f"{kind}.safetensors"] * (COUNT - 1)
    return options


@pytest.mark.few(8, "one command for every rule")
@pytest.mark.parametrize("rule", [*AGGREGATORS.names(), *METHODS.names()])
def test_every_rule_merges_and_says_what_it_wrote(
    rule: str, folder: Path, tiny_base: Path, tmp_path: Path
) -> None:
    reply = merged(folder, tiny_base, tmp_path, "--rule", rule, *needs_of(rule, folder))
    assert reply["rule"] == rule
    assert [Path(row["update"]).name for row in reply["updates"]] == [
        "0.gymdelta",
        "1.gymdelta",
        "2.gymdelta",
    ]
    with DeltaFile.open(tmp_path / "soup.gymdelta") as soup:
        assert soup.sha256() == reply["sha256"]
        assert soup.norm() == pytest.approx(reply["norm"])
        assert soup.size_bytes == reply["size_bytes"]
    for row, file in zip(reply["updates"], honest(folder), strict=True):
        with DeltaFile.open(file) as update:
            assert row["norm"] == pytest.approx(update.norm())


def test_the_table_names_updates_clipping_parts_and_the_soup(
    folder: Path, tiny_base: Path, tmp_path: Path
) -> None:
    reply = merged(folder, tiny_base, tmp_path, "--rule", "weighted_mean", "--weight", "2,1,1")
    assert [row["weight"] for row in reply["updates"]] == [2.0, 1.0, 1.0]
    assert [row["part"] for row in reply["updates"]] == pytest.approx([0.5, 0.25, 0.25], abs=1e-4)
    cap = reply["updates"][0]["norm"] / 2
    done = gym(
        "merge", *honest(folder), "-o", tmp_path / "clipped.gymdelta", "--base", tiny_base,
        "--rule", "weighted_mean", "--weight", "2,1,1", "--set", f"max_norm={cap}",
    )  # fmt: skip
    assert done.exit_code == 0, done.exception
    row = next(line for line in done.output.splitlines() if "0.gymdelta" in line).split()
    assert row[1:] == ["2", f"{2 * cap:.4g}", "0.5000", "25.0%"]
    with DeltaFile.open(tmp_path / "clipped.gymdelta") as soup:
        assert f"sha256 {soup.sha256()}" in done.output


def test_steps_go_before_the_rule_in_their_order_with_settings_of_their_own(
    folder: Path, tiny_base: Path, tmp_path: Path
) -> None:
    words = ("--rule", "trimmed_mean", "--num-malicious-nodes", "1", "--pre", "norm_cap", "--pre", "nnm")
    updates = [*honest(folder), folder / f"{COUNT - 1}.gymdelta"]
    reply = json.loads(
        gym("merge", *updates, "-o", tmp_path / "a.gymdelta", "--base", tiny_base, *words, "--json").stdout
    )
    assert reply["pre_aggregators"] == ["norm_cap", "nnm"]
    assert reply["norm"] < 2 * reply["updates"][0]["norm"]
    other = json.loads(
        gym(
            "merge", *updates, "-o", tmp_path / "b.gymdelta", "--base", tiny_base, *words,
            "--set", "nnm.num_neighbours=1", "--json",
        ).stdout
    )  # fmt: skip
    assert other["sha256"] != reply["sha256"]


def test_settings_of_a_method_arrive(folder: Path, tiny_base: Path, tmp_path: Path) -> None:
    whole = merged(folder, tiny_base, tmp_path, "--rule", "task_arithmetic")
    half = merged(
        folder, tiny_base, tmp_path, "--rule", "task_arithmetic", "--set", "scale=0.5", "--overwrite"
    )
    assert half["norm"] == pytest.approx(whole["norm"] / 2, rel=1e-5)


@pytest.mark.parametrize(("codec", "more"), [("bitdelta", ()), ("lora", ("--set", "codec.rank=2"))])
def test_the_soup_is_written_in_the_codec_asked_for(
    codec: str, more: tuple[str, ...], folder: Path, tiny_base: Path, tmp_path: Path
) -> None:
    reply = merged(folder, tiny_base, tmp_path, "--rule", "mean", "--codec", codec, *more)
    assert reply["bits_per_weight"] < 32
    with DeltaFile.open(tmp_path / "soup.gymdelta") as soup:
        assert codec in {soup.record(name).codec for name in soup.names}


def test_model_folders_and_lora_runs_are_merged_like_deltas(tiny_base: Path, tmp_path: Path) -> None:
    from peft import LoraConfig, get_peft_model

    base = load_model(str(tiny_base))
    before = {name: tensor.clone() for name, tensor in model_tensors(base.model).items()}
    with torch.no_grad():
        for tensor in model_tensors(base.model).values():
            tensor.add_(0.01)
    base.model.save_pretrained(tmp_path / "full")
    base.tokenizer.save_pretrained(tmp_path / "full")
    adapted = get_peft_model(
        load_model(str(tiny_base)).model,
        LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False, task_type="CAUSAL_LM"),
    )
    adapted.peft_config["default"].base_model_name_or_path = str(tiny_base)
    adapted.save_pretrained(tmp_path / "run")
    done = gym(
        "merge", tmp_path / "full", tmp_path / "run", "-o", tmp_path / "s.gymdelta", "--base", tiny_base,
        "--rule", "linear", "--codec", "exact",
    )  # fmt: skip
    assert done.exit_code == 0, done.exception
    tuned = adapted.merge_and_unload()
    with DeltaFile.open(tmp_path / "s.gymdelta") as soup:
        for name, tensor in model_tensors(tuned).items():
            wanted = (torch.full_like(tensor, 0.01) + tensor - before[name]) / 2
            torch.testing.assert_close(soup.decode(name), wanted, rtol=1e-4, atol=1e-7)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["full", "run", "s.gymdelta"]


def test_a_greedy_soup_lists_who_joined(folder: Path, tiny_base: Path, tmp_path: Path) -> None:
    text = folder / "text.jsonl"
    done = gym(
        "merge", *honest(folder), folder / "3.gymdelta", "-o", tmp_path / "s.gymdelta", "--base", tiny_base,
        "--rule", "greedy_soup", "--heldout", text,
    )  # fmt: skip
    assert done.exit_code == 0, done.exception
    lines = done.output.splitlines()
    assert sum("alone; joined" in line for line in lines) >= 1
    refused = [line for line in lines if "the soup would score" in line]
    assert any("3.gymdelta" in line for line in refused), done.output
    base = load_model(str(tiny_base))
    loss = heldout_loss(base.model, base.tokenizer, [json.loads(line) for line in TEXT.splitlines()])
    assert any(line.startswith(f"heldout: loss {loss:.4f} -> ") for line in lines)


def test_the_gate_forbids_a_soup_that_does_worse_and_leaves_no_trace(
    folder: Path, tiny_base: Path, tmp_path: Path
) -> None:
    bad, text = folder / f"{COUNT - 1}.gymdelta", folder / "text.jsonl"
    words = ("merge", bad, "-o", tmp_path / "s.gymdelta", "--base", tiny_base, "--gate", text, "--rule")
    error = error_of(gym(*words, "linear"))
    assert error.code is ErrorCode.UPDATE_REFUSED
    assert "text.jsonl, above the limit of" in str(error)
    assert list(tmp_path.iterdir()) == []
    error = error_of(gym(*words, "greedy_soup", "--heldout", text))
    assert "no model may join" in str(error)
    assert gym(*words, "linear", "--set", "gate.tolerance=1000").exit_code == 0


def test_a_broken_update_is_an_error_or_named_and_left_out(
    folder: Path, tiny_base: Path, tmp_path: Path
) -> None:
    broken = tmp_path / "broken.gymdelta"
    broken.write_bytes((folder / "0.gymdelta").read_bytes()[:-8])
    files = [folder / "0.gymdelta", broken, folder / "1.gymdelta"]
    words = ("merge", *files, "-o", tmp_path / "s.gymdelta", "--base", tiny_base, "--rule", "weighted_mean")
    error = error_of(gym(*words))
    assert error.code is ErrorCode.DELTA_INVALID
    assert str(broken) in error.message
    assert "--skip-broken" in error.hint
    done = gym(*words, "--weight", "3,5,1", "--skip-broken", "--json")
    assert done.exit_code == 0, done.exception
    reply = json.loads(done.stdout)
    assert list(reply["refused"]) == [str(broken)]
    assert [row["weight"] for row in reply["updates"]] == [3.0, 1.0]
    assert [row["part"] for row in reply["updates"]] == pytest.approx([0.75, 0.25], abs=1e-4)
    only = gym(
        "merge", broken, "-o", tmp_path / "t.gymdelta", "--base", tiny_base, "--rule", "mean", "--skip-broken"
    )
    assert "no update of 1 can" in str(error_of(only))


def test_wrong_words_are_refused_before_anything_is_written(
    folder: Path, tiny_base: Path, tmp_path: Path
) -> None:
    fisher, text = folder / "fisher.safetensors", folder / "text.jsonl"
    for words, code, message in (
        (("--rule", "meen"), ErrorCode.CONFIG_INVALID, "unknown rule 'meen'"),
        (("--rule", "mean", "--pre", "num"), ErrorCode.CONFIG_INVALID, "unknown pre-aggregator 'num'"),
        (
            ("--rule", "mean", "--num-malicious-nodes", "1"),
            ErrorCode.CONFIG_INVALID,
            "withstands no malicious client",
        ),
        (("--rule", "krum", "--num-malicious-nodes", "1"), ErrorCode.CONFIG_INVALID, "needs 5"),
        (("--rule", "mean", "--weight", "1,2,3"), ErrorCode.CONFIG_INVALID, "weights differ"),
        (("--rule", "mean", "--weight", "1,2"), ErrorCode.USAGE, "2 weights for 3 updates"),
        (("--rule", "mean", "--weight", "1,2,x"), ErrorCode.USAGE, "not numbers"),
        (("--rule", "mean", "--set", "nnm.k=3"), ErrorCode.USAGE, "unknown step"),
        (("--rule", "mean", "--statistics", fisher), ErrorCode.USAGE, "--statistics"),
        (("--rule", "mean", "--root", folder / "0.gymdelta"), ErrorCode.USAGE, "root"),
        (("--rule", "mean", "--set", "gate.tolerance=1"), ErrorCode.USAGE, "needs --gate"),
        (("--rule", "mean", "--codec", "zip"), ErrorCode.CONFIG_INVALID, "codec"),
        (
            ("--rule", "mean", "--codec", "dense", "--set", "codec.rank=2"),
            ErrorCode.CONFIG_INVALID,
            "lora_rank",
        ),
        (("--rule", "mean", "--set", "codec.rank=2"), ErrorCode.USAGE, "codec.rank"),
        (
            ("--rule", "mean", "--codec", "dense", "--set", "codec.max_error=0.1"),
            ErrorCode.USAGE,
            "codec.max_error",
        ),
        (("--rule", "ties", "--pre", "norm_cap"), ErrorCode.USAGE, "--pre"),
        (("--rule", "ties", "--set", "max_norm=1"), ErrorCode.USAGE, "max_norm"),
        (("--rule", "ties", "--root", folder / "0.gymdelta"), ErrorCode.USAGE, "--root"),
        (
            ("--rule", "ties", "--num-malicious-nodes", "1"),
            ErrorCode.CONFIG_INVALID,
            "withstand no malicious client",
        ),
        (("--rule", "ties", "--set", "density=2"), ErrorCode.CONFIG_INVALID, "density"),
        (("--rule", "ties", "--set", "densty=0.5"), ErrorCode.CONFIG_INVALID, "did you mean 'density'"),
        (("--rule", "ties", "--statistics", fisher), ErrorCode.USAGE, "needs no statistics"),
        (("--rule", "sce", "--weight", "1,2,3"), ErrorCode.CONFIG_INVALID, "weights differ"),
        (("--rule", "fisher", "--statistics", fisher), ErrorCode.USAGE, "given 1 time"),
        (
            ("--rule", "regmean", *["--statistics", fisher] * 3),
            ErrorCode.DATA_INVALID,
            "contains fisher diagonals",
        ),
        (("--rule", "greedy_soup"), ErrorCode.USAGE, "--heldout"),
        (("--rule", "greedy_soup", "--gate", text), ErrorCode.USAGE, "--heldout"),
        (("--rule", "linear", "--heldout", tmp_path / "no.jsonl"), ErrorCode.FILE_NOT_FOUND, "no.jsonl"),
    ):
        done = gym("merge", *honest(folder), "-o", tmp_path / "s.gymdelta", "--base", tiny_base, *words)
        error = error_of(done)
        assert error.code is code, (words, error)
        assert message in str(error), words
        assert list(tmp_path.iterdir()) == [], words
    (tmp_path / "s.gymdelta").write_bytes(b"mine")
    done = gym("merge", *honest(folder), "-o", tmp_path / "s.gymdelta", "--base", tiny_base, "--rule", "mean")
    assert error_of(done).code is ErrorCode.FILE_EXISTS
    assert (tmp_path / "s.gymdelta").read_bytes() == b"mine"


def test_the_same_merge_gives_the_same_bytes(folder: Path, tiny_base: Path, tmp_path: Path) -> None:
    words = ("--rule", "dare_ties", "--set", "density=0.5", "--set", "seed=4")
    first = merged(folder, tiny_base, tmp_path, *words)
    assert merged(folder, tiny_base, tmp_path, *words, "--overwrite")["sha256"] == first["sha256"]
    other = merged(folder, tiny_base, tmp_path, *words, "--set", "seed=5", "--overwrite")
    assert other["sha256"] != first["sha256"]


def test_rules_lists_every_rule_with_what_it_needs() -> None:
    done = gym("rules", "--json")
    assert done.exit_code == 0, done.exception
    reply = {rule["name"]: rule for rule in json.loads(done.stdout)}
    known = {*AGGREGATORS.names(), *PRE_AGGREGATORS.names(), *METHODS.names(), *SERVER_OPTIMIZERS.names()}
    assert set(reply) == known
    assert [reply["krum"]["minimum_updates"][f] for f in "123"] == [5, 7, 9]
    assert reply["mean"]["robust"] is False
    assert reply["trimmed_mean"]["robust"] is True
    assert reply["ties"]["settings"] == {"scale": 1.0, "density": 0.2}
    assert reply["fisher"]["needs"] == "fisher diagonals"
    assert reply["model_stock"]["minimum_updates"] == {"0": 2}
    assert all(rule["summary"].endswith(".") for rule in reply.values())
    plain = gym("rules").output
    assert all(name in plain for name in reply)


def test_statistics_refuse_to_overwrite_and_report_what_they_hold(
    folder: Path, tiny_base: Path, tmp_path: Path
) -> None:
    words = ("statistics", tiny_base, "--data", folder / "text.jsonl", "--kind", "fisher", "-o")
    done = gym(*words, tmp_path / "f.safetensors", "--limit", 1, "--json")
    assert done.exit_code == 0, done.exception
    reply = json.loads(done.stdout)
    assert reply["num_rows"] == 1
    assert reply["num_tensors"] == len(model_tensors(load_model(str(tiny_base)).model))
    assert reply["size_bytes"] == (tmp_path / "f.safetensors").stat().st_size
    assert error_of(gym(*words, tmp_path / "f.safetensors")).code is ErrorCode.FILE_EXISTS
