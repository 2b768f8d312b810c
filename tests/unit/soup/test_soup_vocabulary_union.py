"""`gym soup merge` of updates with different added tokens, by the text of the tokens."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import Result
from typer.testing import CliRunner

from gym_fed.base.models import load_model, load_tokenizer
from gym_fed.cli.main import app
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.delta.file import DeltaFile
from tests.support.added_tokens import save_with_tokens

FIRST, SECOND = ["<think>", "<a>"], ["<b>", "<think>"]


def gym(*words: object) -> Result:
    return CliRunner().invoke(app, [str(word) for word in words])


@pytest.fixture(scope="module")
def tuned(tmp_path_factory: pytest.TempPathFactory, tiny_base: Path) -> tuple[Path, Path]:
    """Two fine-tunes that share one added token, under different ids; one vocabulary is padded."""
    folder = tmp_path_factory.mktemp("union")
    save_with_tokens(tiny_base, folder / "one", FIRST, seed=1)
    save_with_tokens(tiny_base, folder / "two", SECOND, rows=300, seed=2)
    return folder / "one", folder / "two"


def soup(base: Path, updates: list[Path], folder: Path, *options: object) -> Any:
    """Merge, apply the soup to the base, and load the model."""
    out = folder / "soup.gymdelta"
    done = gym("soup", "merge", *updates, "--base", base, "-o", out, "--codec", "exact", *options)
    assert done.exit_code == 0, done.exception
    done = gym("delta", "apply", base, out, "-o", folder / "merged")
    assert done.exit_code == 0, done.exception
    return load_model(str(folder / "merged"))


def row(model: Any, token: str) -> torch.Tensor:
    number = model.tokenizer.convert_tokens_to_ids(token)
    weight: torch.Tensor = model.model.get_input_embeddings().weight[number]
    return weight


def test_a_soup_has_the_union_of_tokens_and_merges_the_shared_ones_by_name(
    tmp_path: Path, tiny_base: Path, tuned: tuple[Path, Path]
) -> None:
    one, two, base = (load_model(str(path)) for path in (*tuned, tiny_base))
    merged = soup(tiny_base, list(tuned), tmp_path, "--rule", "linear", "--weight", "3,1")
    old = len(base.tokenizer)
    ids = [merged.tokenizer.convert_tokens_to_ids(token) for token in ("<think>", "<a>", "<b>")]
    assert ids == [old, old + 1, old + 2]
    assert len(merged.model.get_input_embeddings().weight) == old + 3
    known = base.tokenizer.get_vocab()
    assert {token: merged.tokenizer.get_vocab()[token] for token in known} == known
    assert torch.equal(row(merged, "<a>"), row(one, "<a>"))
    assert torch.equal(row(merged, "<b>"), row(two, "<b>"))
    expected = 0.75 * row(one, "<think>") + 0.25 * row(two, "<think>")
    assert torch.allclose(row(merged, "<think>"), expected, atol=1e-6)
    first, second, whole = (m.model.get_input_embeddings().weight[:old] for m in (one, two, merged))
    assert torch.allclose(whole, 0.75 * first + 0.25 * second, atol=1e-6)


def test_task_vectors_of_a_shared_token_start_at_the_mean_of_its_rows(
    tmp_path: Path, tiny_base: Path, tuned: tuple[Path, Path]
) -> None:
    one, two = (load_model(str(path)) for path in tuned)
    merged = soup(tiny_base, list(tuned), tmp_path, "--rule", "task_arithmetic", "--weight", "2,1")
    first, second = row(one, "<think>"), row(two, "<think>")
    mean = (first + second) / 2
    difference = row(merged, "<think>") - mean
    direction = 2 * (first - mean) + (second - mean)
    assert torch.allclose(
        difference, direction * (difference @ direction) / (direction @ direction), atol=1e-5
    )
    assert torch.allclose(row(merged, "<a>"), row(one, "<a>"), atol=1e-6)


def test_deltas_and_models_with_and_without_tokens_merge_under_a_robust_rule_and_held_out_rows(
    tmp_path: Path, tiny_base: Path, tuned: tuple[Path, Path]
) -> None:
    save_with_tokens(tiny_base, tmp_path / "plain", [], seed=3)
    delta = tmp_path / "two.gymdelta"
    assert gym("delta", "encode", tiny_base, tuned[1], "-o", delta).exit_code == 0
    (tmp_path / "rows.jsonl").write_text('{"text": "<think>to be or not</think> to be"}\n' * 3)
    merged = soup(
        tiny_base,
        [tuned[0], delta, tmp_path / "plain"],
        tmp_path,
        *("--rule", "trimmed_mean", "--num-malicious-nodes", 0, "--heldout", tmp_path / "rows.jsonl"),
    )
    assert {"<think>", "<a>", "<b>"} <= merged.tokenizer.get_vocab().keys()
    two = load_model(str(tuned[1]))
    assert torch.equal(row(merged, "<b>"), row(two, "<b>"))
    with DeltaFile.open(tmp_path / "soup.gymdelta", added_tokens=True) as opened:
        assert [token.text for token in opened.vocabulary.tokens] == ["<think>", "<a>", "<b>"]


def test_a_fine_tune_with_other_ids_for_the_base_tokens_is_refused_by_the_first_token(
    tmp_path: Path, tiny_base: Path
) -> None:
    save_with_tokens(tiny_base, tmp_path / "base", ["one", "two"])
    save_with_tokens(tiny_base, tmp_path / "other", ["two", "one"])
    done = gym(
        *("soup", "merge", tmp_path / "other", "--base", tmp_path / "base", "--rule", "linear"),
        *("-o", tmp_path / "soup.gymdelta"),
    )
    assert isinstance(done.exception, GymError)
    assert done.exception.code is ErrorCode.BASE_MISMATCH
    assert "the first is 'one'" in done.exception.message
    assert not (tmp_path / "soup.gymdelta").exists()


@pytest.mark.parametrize("rule", ["median", "trimmed_mean"])
def test_one_hostile_row_of_a_shared_token_leaves_a_robust_soup_within_the_honest_rows(
    tmp_path: Path, tiny_base: Path, rule: str
) -> None:
    updates = [tmp_path / str(seed) for seed in range(5)]
    for seed, folder in enumerate(updates):
        model = save_with_tokens(tiny_base, folder, ["<think>"], seed=seed)
        if seed == 4:
            with torch.no_grad():
                model.get_input_embeddings().weight[-1] = 1e12
            model.save_pretrained(folder)
    malicious = () if rule == "median" else ("--num-malicious-nodes", 1)
    merged = soup(tiny_base, updates, tmp_path, "--rule", rule, *malicious)
    honest = torch.stack([row(load_model(str(folder)), "<think>") for folder in updates[:4]])
    found = row(merged, "<think>")
    assert bool((found >= honest.amin(0) - 1e-6).all())
    assert bool((found <= honest.amax(0) + 1e-6).all())
    assert bool(found.abs().max() > 0.01)


def test_padded_vocabularies_without_tokens_merge_to_the_vocabulary_of_the_base(
    tmp_path: Path, tiny_base: Path
) -> None:
    for seed in (1, 2):
        save_with_tokens(tiny_base, tmp_path / str(seed), [], rows=300, seed=seed)
    merged = soup(tiny_base, [tmp_path / "1", tmp_path / "2"], tmp_path, "--rule", "linear")
    base = load_model(str(tiny_base)).model.get_input_embeddings().weight
    assert merged.model.get_input_embeddings().weight.shape == base.shape
    with DeltaFile.open(tmp_path / "soup.gymdelta") as opened:
        assert opened.added_rows is None


def test_end_tokens_that_differ_are_reported_and_the_first_is_kept(tmp_path: Path, tiny_base: Path) -> None:
    for name in ("a", "b"):
        save_with_tokens(tiny_base, tmp_path / name, [f"<|{name}|>"])
        tokenizer = load_tokenizer(str(tmp_path / name))
        tokenizer.eos_token = f"<|{name}|>"
        tokenizer.save_pretrained(tmp_path / name)
    out = tmp_path / "soup.gymdelta"
    words = ("--base", tiny_base, "--rule", "linear", "-o", out, "--json")
    done = gym("soup", "merge", tmp_path / "a", tmp_path / "b", *words)
    assert done.exit_code == 0, done.exception
    assert "eos_token: '<|b|>'" in json.loads(done.stdout)["not_merged"][str(tmp_path / "b")]


def test_changes_of_rows_without_a_token_are_reported_with_their_norm(
    tmp_path: Path, tiny_base: Path
) -> None:
    base = tmp_path / "base"
    weight = save_with_tokens(tiny_base, base, [], rows=300).get_input_embeddings().weight.detach()
    size = len(load_tokenizer(str(base)))
    names = {"token and rows": ["<think>"], "rows alone": [], "token alone": ["<a>"]}
    for seed, (name, tokens) in enumerate(names.items()):
        model = save_with_tokens(base, tmp_path / name, tokens, seed=seed)
        own = model.get_input_embeddings().weight
        with torch.no_grad():
            own[size + len(tokens) :] = weight[size + len(tokens) :]
            if "rows" in name:
                own[280] += 0.5
        model.save_pretrained(tmp_path / name)
    words = ("--base", base, "--rule", "linear", "-o", tmp_path / "soup.gymdelta", "--json")
    done = gym("soup", "merge", *(tmp_path / name for name in names), *words)
    assert done.exit_code == 0, done.exception
    reported = json.loads(done.stdout)["not_merged"]
    norm = 0.5 * weight.shape[1] ** 0.5
    text = f"rows of model.embed_tokens.weight without a token, whose change has norm {norm:.3g}"
    assert reported == {str(tmp_path / name): [text] for name in ("token and rows", "rows alone")}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_tokens_of_a_model_with_its_own_head_are_merged_in_embeddings_and_head(
    tmp_path: Path, tiny_base: Path, dtype: str
) -> None:
    loaded = load_model(str(tiny_base))
    untied: Any = loaded.model
    untied.lm_head.weight = torch.nn.Parameter(untied.lm_head.weight.detach() * 1.5)
    untied.config.tie_word_embeddings = False
    untied.to(getattr(torch, dtype)).save_pretrained(tmp_path / "base")
    loaded.tokenizer.save_pretrained(tmp_path / "base")
    updates = [tmp_path / name for name in ("one", "two")]
    for seed, (path, tokens) in enumerate(zip(updates, (FIRST, SECOND), strict=True)):
        save_with_tokens(tmp_path / "base", path, tokens, seed=seed)
    merged = soup(tmp_path / "base", updates, tmp_path, "--rule", "linear")
    one, two = (load_model(str(path)) for path in updates)
    for part in ("get_input_embeddings", "get_output_embeddings"):

        def own(model: Any, token: str, part: str = part) -> torch.Tensor:
            weight: torch.Tensor = getattr(model.model, part)().weight
            return weight[model.tokenizer.convert_tokens_to_ids(token)].float()

        assert torch.equal(own(merged, "<a>"), own(one, "<a>"))
        assert torch.equal(own(merged, "<b>"), own(two, "<b>"))
        expected = (own(one, "<think>") + own(two, "<think>")) / 2
        limit = 1e-6 if dtype == "float32" else 2**-8 * float(expected.detach().abs().max())
        torch.testing.assert_close(own(merged, "<think>"), expected, rtol=0, atol=limit)
    assert not torch.equal(own(merged, "<think>"), row(merged, "<think>").float())
