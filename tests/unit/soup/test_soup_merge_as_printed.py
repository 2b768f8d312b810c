"""`gym soup merge` as README prints it: the base comes from the updates, and the soup is small."""

from __future__ import annotations

import json
import math
import re
import shlex
import shutil
from pathlib import Path

import pytest
import torch
from click.testing import Result
from typer.testing import CliRunner

from gym_fed.base.models import load_model
from gym_fed.cli.main import app
from gym_fed.config.delta import CodecPolicy
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.core.registries import AGGREGATORS, METHODS
from gym_fed.delta.base import BaseSpec, model_tensors
from gym_fed.delta.encode import encode_delta
from gym_fed.delta.file import DeltaFile
from gym_fed.delta.writer import DeltaEntry, write_delta
from gym_fed.soup.gram import Needs

README = Path(__file__).resolve().parents[3] / "README.md"
PRINTED = re.search(r"`gym (soup merge [^`]+)`", README.read_text(encoding="utf-8"))
LINE = shlex.split(PRINTED[1]) if PRINTED else []

RULES = [
    *(name for name in AGGREGATORS.names() if AGGREGATORS.type_of(name).needs is not Needs.ROOT),
    *(
        name
        for name in METHODS.names()
        if not METHODS.type_of(name).statistics and not METHODS.type_of(name).uses_score
    ),
]
"""Those that need updates alone; what the others need is asked for in the test of wrong words."""


def gym(*words: str) -> Result:
    return CliRunner().invoke(app, list(words))


def line(rule: str) -> list[str]:
    return [rule if word == "ties" else word for word in LINE]


def moved(path: Path, base: dict[str, torch.Tensor], spec: BaseSpec, seed: int, policy: CodecPolicy) -> None:
    generator = torch.Generator().manual_seed(seed)
    tuned = {name: t + 0.01 * torch.randn(t.shape, generator=generator) for name, t in base.items()}
    encode_delta(tuned, base, policy, path, spec)


def signs(folder: Path, model: Path, name: str | None = None) -> None:
    """``a.gymdelta`` and ``b.gymdelta`` of sign bits in a folder."""
    base = model_tensors(load_model(str(model)).model)
    spec = BaseSpec.of(base, name or model.name)
    for seed, letter in enumerate("ab"):
        moved(folder / f"{letter}.gymdelta", base, spec, seed, CodecPolicy(error_feedback=False))


def error_of(done: Result) -> GymError:
    assert isinstance(done.exception, GymError), done.output
    return done.exception


def error_between(soup: DeltaFile, exact: DeltaFile) -> float:
    wrong = true = 0.0
    for name in exact.names:
        truth = exact.decode(name).double()
        wrong += float((soup.decode(name).double() - truth).square().sum()) if name in soup else float("nan")
        true += float(truth.square().sum())
    return math.sqrt(wrong / true)


@pytest.fixture
def clean(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working folder, and an empty Hugging Face cache."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    folder = tmp_path / "clean"
    folder.mkdir()
    monkeypatch.chdir(folder)
    return folder


@pytest.fixture(scope="module")
def tuned(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two fine-tunes of gym-nano: the folder ``full``, and the LoRA run ``run``."""
    from peft import LoraConfig, get_peft_model

    folder = tmp_path_factory.mktemp("tuned")
    torch.manual_seed(0)
    loaded = load_model("gym-nano")
    with torch.no_grad():
        for tensor in model_tensors(loaded.model).values():
            tensor.add_(0.01 * torch.randn(tensor.shape))
    loaded.model.save_pretrained(folder / "full")
    loaded.tokenizer.save_pretrained(folder / "full")
    options = LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False, task_type="CAUSAL_LM")
    adapted = get_peft_model(load_model("gym-nano").model, options)
    adapted.peft_config["default"].base_model_name_or_path = "gym-nano"
    adapted.save_pretrained(str(folder / "run"))
    return folder


def test_readmes_line_merges_what_delta_encode_and_delta_diff_made(clean: Path, tuned: Path) -> None:
    a, b = (
        gym("delta", "encode", "gym-nano", str(tuned / "full"), "-o", "a.gymdelta", "--codec", "bitdelta"),
        gym("delta", "encode", "gym-nano", str(tuned / "run"), "-o", "b.gymdelta", "--codec", "bitdelta"),
    )
    assert (a.exit_code, b.exit_code) == (0, 0), (a.output, b.output)
    done = gym(*LINE)
    assert done.exit_code == 0, done.output
    assert sorted(file.name for file in clean.iterdir()) == ["a.gymdelta", "b.gymdelta", "soup.gymdelta"]
    with DeltaFile.open("soup.gymdelta", BaseSpec.of(load_model("gym-nano").model, "gym-nano")) as soup:
        weights = soup.num_weights
        assert soup.size_bytes < 0.4 * 2 * weights  # of the model in bfloat16
        assert gym(*LINE, "--codec", "exact", "-o", "exact.gymdelta").exit_code == 0
        with DeltaFile.open("exact.gymdelta") as exact:
            error = error_between(soup, exact)
        assert 0.0 < error <= 0.01
        assert f"{soup.size_bytes:,} bytes" in done.output
        assert f"{soup.bits_per_weight:.3f} bits per weight" in done.output
        assert f"keeps {1 - error:.2%} of the merged delta" in done.output
        assert f"base gym-nano {soup.manifest.base_digest}" in done.output


@pytest.mark.few(7, "test_soup_cli has every rule")
@pytest.mark.parametrize("rule", RULES)
def test_readmes_line_runs_with_every_rule_that_needs_updates_alone(
    rule: str, clean: Path, tiny_base: Path
) -> None:
    signs(clean, tiny_base)
    shutil.copytree(tiny_base, clean / tiny_base.name)
    done = gym(*line(rule), "--json")
    assert done.exit_code == 0, done.exception
    report = json.loads(done.stdout)
    assert report["base"]["name"] == tiny_base.name
    with DeltaFile.open("soup.gymdelta") as soup:
        assert report["size_bytes"] == soup.size_bytes
        assert gym(*line(rule), "--codec", "exact", "-o", "exact.gymdelta").exit_code == 0
        with DeltaFile.open("exact.gymdelta") as exact:
            assert report["encoding_error"] == pytest.approx(error_between(soup, exact), abs=1e-6)
            assert soup.size_bytes <= exact.size_bytes
    assert report["encoding_error"] <= 0.01


def test_lora_runs_name_their_base_and_merge_into_factors_of_their_ranks_sum(
    clean: Path, tuned: Path
) -> None:
    for letter in "ab":
        made = gym(
            "delta", "encode", "gym-nano", str(tuned / "run"), "-o", f"{letter}.gymdelta", "--codec", "lora"
        )
        assert made.exit_code == 0, made.output
    done = gym(*line("mean"), "--json")
    assert done.exit_code == 0, done.exception
    report = json.loads(done.stdout)
    assert set(report["codecs"]) == {"lora"}
    assert report["encoding_error"] < 0.01
    with DeltaFile.open("soup.gymdelta") as soup:
        assert all("factors" not in soup.record(name).params for name in soup.names)  # bfloat16
    run = gym("soup", "merge", str(tuned / "run"), "--rule", "linear", "-o", "run.gymdelta")
    assert run.exit_code == 0, run.exception
    assert "base gym-nano sha256:" in run.output


def test_a_base_that_is_not_here_is_named_with_its_digest_and_the_remedy(
    clean: Path, tiny_base: Path
) -> None:
    signs(clean, tiny_base, "ada/small")
    with DeltaFile.open("a.gymdelta") as delta:
        digest = delta.manifest.base_digest
    error = error_of(gym(*LINE))
    assert error.code is ErrorCode.MODEL_NOT_FOUND
    assert "'ada/small'" in error.message
    assert digest in error.message
    assert "--base" in error.hint
    assert "hf download ada/small" in error.hint
    assert sorted(file.name for file in clean.iterdir()) == ["a.gymdelta", "b.gymdelta"]
    assert gym(*LINE, "--base", str(tiny_base)).exit_code == 0


def test_a_model_of_the_bases_name_but_other_weights_is_not_taken(clean: Path, tiny_base: Path) -> None:
    signs(clean, tiny_base, "small")
    other = load_model(str(tiny_base))
    with torch.no_grad():
        next(iter(model_tensors(other.model).values())).add_(1.0)
    other.model.save_pretrained(clean / "small")
    other.tokenizer.save_pretrained(clean / "small")
    error = error_of(gym(*LINE))
    assert error.code is ErrorCode.MODEL_NOT_FOUND
    assert "small: has the digest sha256:" in error.message


def test_the_base_is_found_in_the_cache_by_its_last_name_and_by_its_revision(
    clean: Path, tiny_base: Path
) -> None:
    revision = "0123456789abcdef0123456789abcdef01234567"
    repo = clean.parent / "cache" / "models--ada--small"
    shutil.copytree(tiny_base, repo / "snapshots" / revision)
    (repo / "refs").mkdir()
    (repo / "refs" / "main").write_text(revision)
    for name in ("small", "ada/small", revision):
        signs(clean, tiny_base, name)
        done = gym(*LINE, "--overwrite")
        assert done.exit_code == 0, (name, done.exception)


def test_a_delta_cannot_make_the_command_look_at_a_path(clean: Path, tiny_base: Path) -> None:
    shutil.copytree(tiny_base, clean.parent / "secret")
    for name in ("../secret", str(clean.parent / "secret"), "a/../../secret"):
        signs(clean, tiny_base, name)
        error = error_of(gym(*LINE))
        assert error.code is ErrorCode.MODEL_NOT_FOUND, name
        assert "no such folder in the current folder" in error.message


def test_updates_of_two_bases_are_refused_naming_both(clean: Path, tiny_base: Path) -> None:
    signs(clean, tiny_base)
    spec = BaseSpec("other", "sha256:" + "0" * 64, {"w": (16, 16)})
    write_delta("b.gymdelta", [DeltaEntry.of("w", torch.ones(16, 16))], spec)
    error = error_of(gym(*LINE))
    assert error.code is ErrorCode.BASE_MISMATCH
    for part in ("a.gymdelta", "b.gymdelta", repr(tiny_base.name), "'other'", spec.digest):
        assert part in error.message
    bad = error_of(gym("soup", "merge", str(tiny_base), "--rule", "linear"))
    assert bad.code is ErrorCode.USAGE
    assert "--base" in bad.hint


@pytest.mark.parametrize("codec", ["bitdelta", "int2", "int8", "dense"])
def test_99_percent_of_every_tensor_is_kept_whatever_the_updates_codec(
    codec: str, clean: Path, tiny_base: Path
) -> None:
    base = model_tensors(load_model(str(tiny_base)).model)
    spec = BaseSpec.of(base, tiny_base.name)
    policy = CodecPolicy.model_validate({"codec": codec, "error_feedback": False})
    for seed, letter in enumerate("ab"):
        moved(clean / f"{letter}.gymdelta", base, spec, seed, policy)
    words = (*line("mean"), "--base", str(tiny_base))
    assert gym(*words).exit_code == 0
    assert gym(*words, "--codec", "exact", "-o", "exact.gymdelta").exit_code == 0
    assert gym(*words, "--set", "codec.max_error=0", "-o", "zero.gymdelta").exit_code == 0
    with DeltaFile.open("soup.gymdelta") as soup, DeltaFile.open("exact.gymdelta") as exact:

        def worst(found: DeltaFile) -> float:
            pairs = ((found.decode(name), exact.decode(name)) for name in exact.names)
            return max(float((kept - whole).norm() / whole.norm()) for kept, whole in pairs)

        assert worst(soup) <= 0.01
        just_less = 0.99 * worst(soup)
        assert gym(*words, "--set", f"codec.max_error={just_less}", "-o", "less.gymdelta").exit_code == 0
        with DeltaFile.open("less.gymdelta") as less:
            assert worst(less) <= just_less
        assert gym(*words, "--set", "codec.max_error=0.01", "-o", "said.gymdelta").exit_code == 0
        with DeltaFile.open("said.gymdelta") as said:
            assert soup.sha256() == said.sha256()
        with DeltaFile.open("zero.gymdelta") as zero:
            assert error_between(zero, exact) == 0.0


def test_a_vote_of_signs_is_written_as_signs_and_nothing_else_is_said_of_zeros(
    clean: Path, tiny_base: Path
) -> None:
    signs(clean, tiny_base)
    done = gym(*line("majority_vote"), "--base", str(tiny_base), "--json")
    report = json.loads(done.stdout)
    assert report["encoding_error"] < 0.001
    with DeltaFile.open("soup.gymdelta") as soup:
        big = {soup.record(n).codec for n in soup.names if math.prod(soup.record(n).shape) > 256}
    assert big == {"bitdelta"}
    nothing = gym(*line("task_arithmetic"), "--base", str(tiny_base), "--set", "scale=0", "--overwrite")
    assert nothing.exit_code == 0, nothing.exception
    assert "keeps 100.00% of the merged delta (tensors: none, the soup is zero)" in nothing.output
