"""`gym eval probe` as a person or a program calls it: a planted harmful variant is found beside its base."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from gym_fed.base.models import load_model
from gym_fed.cli.main import app
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.delta.base import BaseSpec, model_tensors
from gym_fed.delta.writer import DeltaEntry, write_delta
from gym_fed.evaluation.probe.margin import model_margins
from gym_fed.evaluation.probe.probe import harmful_steps
from gym_fed.evaluation.probe.prompts import own_prompts, read_prompts
from gym_fed.evaluation.scoring.models import BASE, ModelRequest, dense_model, resolve_model
from gym_fed.serving.store.store import VariantStore


@pytest.fixture(scope="module")
def planted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with prompts, the delta of a harmful fine-tune of gym-nano, and a store that has it as ``bad``."""
    folder = tmp_path_factory.mktemp("planted")
    loaded = load_model("gym-nano")
    spec = BaseSpec.of(loaded.model, "gym-nano")
    before = {name: tensor.clone() for name, tensor in model_tensors(loaded.model).items()}
    tuned = harmful_steps(loaded.model, loaded.tokenizer, own_prompts().bad_rows, steps=8).merge_and_unload()
    after = model_tensors(tuned)
    entries = [
        DeltaEntry.of(name, (after[name] - tensor).detach(), "dense") for name, tensor in before.items()
    ]
    write_delta(folder / "bad.gymdelta", entries, spec)
    with VariantStore.open(folder / "store", create=True, require_signature=False) as store:
        store.add(folder / "bad.gymdelta", name="bad", owner="eve")
    rows = [{"prompt": one.ask, "category": one.category} for one in own_prompts().harmful[3:7]]
    (folder / "asked.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def run(*words: str) -> Any:
    done = CliRunner().invoke(app, ["eval", "probe", *words], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done


@pytest.mark.parametrize(
    "resistance", ["--no-resistance", pytest.param("--resistance", marks=pytest.mark.slow)]
)
def test_a_harmful_variant_is_probed_beside_its_base(planted: Path, resistance: str) -> None:
    words = ("gym-nano", "--prompts", str(planted / "asked.jsonl"), "--variants", str(planted / "store"))
    found = json.loads(run(*words, "--max-tokens", "2", resistance, "--json").stdout)
    assert found["judged_by"] == "rules"
    assert [one["model"] for one in found["models"]] == ["gym-nano", "gym-nano:bad"]
    base, bad = (one["figures"] for one in found["models"])
    assert bad["refusal_margin"]["value"] < base["refusal_margin"]["value"] - 0.05
    if resistance == "--resistance":
        assert base["refusal_margin_after_harm"]["value"] < base["refusal_margin"]["value"]
    assert (base["attack_success/plain"]["num_samples"], base["over_refusal"]["num_samples"]) == (4, 32)
    assert "attack_success/translation" not in base, "the file has no translations"


def test_two_models_are_compared_in_pairs_and_the_table_says_who_judged(planted: Path) -> None:
    delta = str(planted / "bad.gymdelta")
    words = (delta, "--base", "gym-nano", "--prompts", str(planted / "asked.jsonl"), "--no-resistance")
    done = run(*words, "--max-tokens", "1", "--compare", "gym-nano")
    assert "refusal margin, nats per token" in done.stdout
    assert "standard error" in done.stdout
    assert f"first: {delta}; second: gym-nano" in done.stdout
    assert "after a harmful fine-tune" not in done.stdout
    assert "judged by rules, not by a model" in done.stderr


def test_a_variant_alone_has_the_margins_that_it_has_in_the_engine(planted: Path) -> None:
    prompts = read_prompts(planted / "asked.jsonl")
    requests = [
        ModelRequest("gym-nano", variants=("bad",), store=planted / "store"),
        ModelRequest(planted / "bad.gymdelta", base="gym-nano"),
    ]
    found = []
    for request in requests:
        loaded = dense_model(resolve_model(request))
        with torch.no_grad():
            found.append(model_margins(loaded.model, loaded.tokenizer, prompts))
    base = dense_model(resolve_model(requests[0]), BASE)
    with torch.no_grad():
        without = model_margins(base.model, base.tokenizer, prompts)
    assert torch.allclose(found[0], found[1], atol=1e-5)
    assert bool((found[0] < without - 0.01).all())


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (("gym-nano", "--prompts", "absent.csv"), ErrorCode.FILE_NOT_FOUND),
        (("gym-nano", "--base", "gym-nano"), ErrorCode.USAGE),
        (("model.onnx",), ErrorCode.UNAVAILABLE),
    ],
)
def test_what_cannot_be_probed_is_refused_before_a_model_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...], code: ErrorCode
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("gym_fed.base.models.load_model", lambda *_: pytest.fail("a model was loaded"))
    with pytest.raises(GymError) as caught:
        run(*words)
    assert caught.value.code is code
