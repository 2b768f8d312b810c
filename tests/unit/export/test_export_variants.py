"""Exported variants: by every name, merged, as their own delta, and as LoRA with the gain that it keeps."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from typer.testing import CliRunner

from gym_fed.base.models import load_model
from gym_fed.cli.main import app
from gym_fed.config.delta import CodecPolicy
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.data.reading import load_rows
from gym_fed.delta.base import BaseSpec
from gym_fed.delta.encode import encode_delta, lora_delta
from gym_fed.delta.file import DeltaFile, apply_delta
from gym_fed.export import nearest
from gym_fed.export.formats.base import Options
from gym_fed.export.nearest import KeptGain, factors_of, kept_gain, largest_components, lora_facts
from gym_fed.export.process import no_report
from gym_fed.export.readers.transformers import loaded
from gym_fed.export.run import export
from gym_fed.export.source import open_source
from gym_fed.serving.store.store import VariantStore
from tests.support.adapters import logits, run, sibling

MATRICES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "lm_head")


class Variants:
    """A base, a one-bit delta of a full tune of it, and a store with that."""

    def __init__(self, folder: Path, **changes: Any) -> None:
        self.base = sibling("Llama", folder / "base", **changes)
        self.store = folder / "variants"
        model = load_model(str(self.base)).model
        self.tuned = copy.deepcopy(model)
        generator = torch.Generator().manual_seed(1)
        with torch.no_grad():
            for parameter in self.tuned.parameters():
                parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.05)
        self.spec = BaseSpec.of(model, "base")
        self.delta = folder / "one.gymdelta"
        policy = CodecPolicy(error_feedback=False)
        encode_delta(self.tuned, model, policy, self.delta, self.spec)
        with VariantStore.open(self.store, require_signature=False) as store:
            store.add(self.delta, name="ada", owner="ada")
        self.dense = model
        with DeltaFile.open(self.delta) as opened:
            apply_delta(self.dense, opened)

    def source(self) -> Any:
        return open_source(str(self.delta), base=str(self.base))


@pytest.fixture(scope="module")
def variants(tmp_path_factory: pytest.TempPathFactory) -> Variants:
    return Variants(tmp_path_factory.mktemp("variants"))


def test_a_variant_is_opened_by_each_of_its_names_as_the_base_with_its_delta(
    variants: Variants, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = logits(variants.dense)
    base, store = str(variants.base), variants.store
    sources = [variants.source(), open_source(base, variant="ada", variants=store)]
    monkeypatch.setenv("GYM_VARIANTS", str(store))
    sources += [open_source(f"{base}:ada"), open_source(base, variant="ada")]
    for source in sources:
        torch.testing.assert_close(logits(source.model), wanted, rtol=0, atol=0)
        assert source.base == base
    assert (wanted - logits(variants.base)).abs().max() > 1e-2


def test_a_merged_variant_computes_what_base_and_delta_do(variants: Variants, tmp_path: Path) -> None:
    record = export(variants.source(), "huggingface", tmp_path / "out", Options(), check=False)
    torch.testing.assert_close(logits(tmp_path / "out"), logits(variants.dense), rtol=0, atol=0)
    assert record["base"] == variants.base.name


def test_a_delta_leaves_byte_for_byte_and_on_a_merged_adapter_encoded_again(
    variants: Variants, tmp_path: Path
) -> None:
    base = load_model(str(variants.base)).model
    grid = CodecPolicy(codec="int4", error_feedback=False)
    encode_delta(variants.tuned, base, grid, tmp_path / "grid.gymdelta", variants.spec)
    source = open_source(str(tmp_path / "grid.gymdelta"), base=str(variants.base))
    export(source, "delta", tmp_path / "same.gymdelta", Options(), check=False)
    assert (tmp_path / "same.gymdelta").read_bytes() == (tmp_path / "grid.gymdelta").read_bytes()
    run(tmp_path / "run", model=str(variants.base))
    merged = load_model(str(tmp_path / "run")).model.merge_and_unload()
    tuned = copy.deepcopy(merged)
    with torch.no_grad():
        tuned.model.norm.weight.add_(0.5)
    stacked = tmp_path / "stacked.gymdelta"
    encode_delta(tuned, merged, CodecPolicy(error_feedback=False), stacked, BaseSpec.of(merged, "merged"))
    source = open_source(str(stacked), base=str(tmp_path / "run"))
    export(source, "delta", tmp_path / "again.gymdelta", Options(), check=False)
    with DeltaFile.open(tmp_path / "again.gymdelta", variants.spec) as again:
        assert {"model.norm.weight", "model.layers.0.self_attn.q_proj.weight"} <= set(again.names)


def test_a_delta_of_factors_becomes_the_adapter_with_these_factors(
    variants: Variants, tmp_path: Path
) -> None:
    names = [f"model.layers.0.self_attn.{name}.weight" for name in ("q_proj", "v_proj")]
    shapes = variants.spec.shapes
    torch.manual_seed(2)
    factors = {
        name: (torch.randn(3, shapes[name][1]), torch.randn(shapes[name][0], 3), 1.5) for name in names
    }
    lora_delta(factors, tmp_path / "lora.gymdelta", variants.spec)
    source = open_source(str(tmp_path / "lora.gymdelta"), base=str(variants.base))
    record = export(source, "adapter", tmp_path / "out", Options(), check=False)
    assert (record["lora"]["exact"], record["lora"]["squared_norm_kept"]) == (True, 1.0)
    assert record["lora"]["left_out"] == {}
    assert record["notes"] == []
    config = json.loads((tmp_path / "out/adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"], config["rank_pattern"]) == (3, 4.5, {})
    written = load_file(tmp_path / "out/adapter_model.safetensors")
    for name, (a, b, _) in factors.items():
        stem = f"base_model.model.{name.removesuffix('.weight')}"
        assert torch.equal(written[f"{stem}.lora_A.weight"], a.bfloat16().float())
        assert torch.equal(written[f"{stem}.lora_B.weight"], b.bfloat16().float())
    model, _ = loaded({"model": str(variants.base), "adapters": [str(tmp_path / "out")]})
    torch.testing.assert_close(logits(model), logits(source.model), rtol=0, atol=2e-5)


def test_factors_of_several_ranks_and_scalings_become_an_adapter_of_one(
    variants: Variants, tmp_path: Path
) -> None:
    shapes = variants.spec.shapes
    torch.manual_seed(3)
    factors = {}
    for end, rank, scaling in (("q_proj", 2, 0.5), ("o_proj", 3, 2.0)):
        name = f"model.layers.0.self_attn.{end}.weight"
        factors[name] = (torch.randn(rank, shapes[name][1]), torch.randn(shapes[name][0], rank), scaling)
    lora_delta(factors, tmp_path / "lora.gymdelta", variants.spec)
    source = open_source(str(tmp_path / "lora.gymdelta"), base=str(variants.base))
    export(source, "adapter", tmp_path / "out", Options(), check=False)
    config = json.loads((tmp_path / "out/adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"], config["rank_pattern"]) == (3, 3, {})
    model, _ = loaded({"model": str(variants.base), "adapters": [str(tmp_path / "out")]})
    torch.testing.assert_close(logits(model), logits(source.model), rtol=0, atol=2e-5)


def test_a_one_bit_delta_becomes_the_nearest_lora_of_its_rank(variants: Variants, tmp_path: Path) -> None:
    record = export(variants.source(), "adapter", tmp_path / "out", Options(rank=4), check=False)
    written = load_file(tmp_path / "out/adapter_model.safetensors")
    lost = total = 0.0
    with DeltaFile.open(variants.delta) as delta:
        for name in delta.names:
            dense = delta.decode(name).double()
            total += float(dense.square().sum())
            stem = f"base_model.model.{name.removesuffix('.weight')}"
            if f"{stem}.lora_A.weight" not in written:
                lost += float(dense.square().sum())
                continue
            held = written[f"{stem}.lora_B.weight"].double() @ written[f"{stem}.lora_A.weight"].double()
            off = float((dense - held).square().sum())
            best = float(torch.linalg.svdvals(dense)[4:].square().sum())
            assert off == pytest.approx(best, rel=1e-5)
            lost += off
    assert record["lora"]["squared_norm_kept"] == pytest.approx(1 - lost / total, rel=1e-5)
    assert {name.split(".")[-3] for name in written} == set(MATRICES)
    assert {name.removeprefix("model.") for name in record["lora"]["left_out"]} == {
        "embed_tokens.weight",
        "norm.weight",
        "layers.0.input_layernorm.weight",
        "layers.0.post_attention_layernorm.weight",
    }
    assert any("left out: 4 changed tensors" in note for note in record["notes"])


def test_the_adapter_computes_the_base_with_the_factors(variants: Variants, tmp_path: Path) -> None:
    source = variants.source()
    export(source, "adapter", tmp_path / "out", Options(rank=4), check=False)
    wanted = load_model(str(variants.base)).model
    found = factors_of(source, 4, no_report)
    with torch.no_grad():
        for name, (a, b) in found.factors.items():
            wanted.get_parameter(name).add_(found.scaling * b @ a)
    model, _ = loaded({"model": str(variants.base), "adapters": [str(tmp_path / "out")]})
    torch.testing.assert_close(logits(model), logits(wanted), rtol=0, atol=2e-5)
    assert (logits(model) - logits(variants.base)).abs().max() > 1e-2


def test_an_output_head_of_its_own_is_held_and_a_shared_one_is_not(tmp_path: Path) -> None:
    for tied in (True, False):
        found = Variants(tmp_path / str(tied), tie_word_embeddings=tied)
        held = factors_of(found.source(), 2, no_report)
        assert ("lm_head.weight" in held.factors) is not tied
        assert "model.embed_tokens.weight" in held.left_out


def test_a_rank_above_a_matrix_keeps_all_of_it(variants: Variants) -> None:
    found = factors_of(variants.source(), 64, no_report)
    assert found.norm_kept == pytest.approx(1 - sum(found.left_out.values()), abs=1e-6)


def test_large_sign_matrices_lose_next_to_nothing_to_iteration() -> None:
    """Of what rank 16 can keep, 99% at least: random signs have a flat spectrum, which is the worst case."""
    torch.manual_seed(0)
    signs = torch.randn(800, 800).sign()
    best = float(torch.linalg.svdvals(signs)[:16].square().sum())
    assert float(largest_components(signs, 16).values.square().sum()) > 0.99 * best


@pytest.mark.parametrize(
    ("lora", "share"), [(2.0, 0.5), (1.0, 1.0), (3.0, 0.0), (4.0, -0.5)], ids=["half", "all", "none", "worse"]
)
def test_the_kept_gain_is_the_share_of_the_fall_of_the_loss(lora: float, share: float) -> None:
    assert KeptGain(1, base=3.0, variant=1.0, lora=lora).kept == share
    assert KeptGain(1, base=1.0, variant=1.0, lora=lora).kept is None


def test_the_kept_gain_is_measured_on_the_rows_that_are_given(variants: Variants, tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text(json.dumps({"text": "one two three four five six seven"}) + "\n")
    source = variants.source()
    whole = kept_gain(source, 64, load_rows(rows), Options())
    small = kept_gain(source, 1, load_rows(rows), Options())
    assert (whole.base, whole.variant, whole.rows) == (small.base, small.variant, 1)
    assert abs(whole.lora - whole.variant) < abs(small.lora - small.variant)
    from gym_fed.evaluation.loss import heldout_loss

    plain = load_model(str(variants.base))
    assert whole.base == pytest.approx(heldout_loss(plain.model, plain.tokenizer, load_rows(rows)), abs=1e-6)


def test_the_command_warns_with_the_share_that_is_kept(variants: Variants, tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text(json.dumps({"text": "a b c d e f"}) + "\n")
    words = [
        "export",
        f"{variants.base}",
        "--variant",
        "ada",
        "--variants",
        str(variants.store),
        "--skip-check",
    ]
    words += ["--format", "adapter", "--rank", "1"]
    result = CliRunner().invoke(app, [*words, "-o", str(tmp_path / "a")])
    assert result.exit_code == 0, result.output
    assert "of the delta's squared norm; its share of the gain is unknown" in " ".join(result.output.split())
    result = CliRunner().invoke(app, [*words, "-o", str(tmp_path / "b"), "--data", str(rows)])
    assert result.exit_code == 0, result.output
    record = json.loads((tmp_path / "b/export.json").read_text())
    gain = record["lora"]["gain"]
    said = " ".join(result.output.split())
    if gain["kept"] is None:
        assert "the variant gains nothing on" in said
    else:
        assert (f"keeps {gain['kept']:.1%} of the gain" in said) is (gain["kept"] < 0.8)


@pytest.mark.parametrize(
    ("lora", "says"),
    [(2.5, "keeps 25.0% of the gain on rows.jsonl"), (1.2, ""), (3.5, "keeps -25.0% of the gain")],
    ids=["a quarter", "most", "worse than the base"],
)
def test_a_note_warns_where_less_than_80_percent_of_the_gain_is_kept(
    variants: Variants, monkeypatch: pytest.MonkeyPatch, lora: float, says: str
) -> None:
    monkeypatch.setattr(nearest, "kept_gain", lambda *_: KeptGain(1, base=3.0, variant=1.0, lora=lora))
    options = Options(rank=4, rows=[{"text": "a"}], rows_name="rows.jsonl")
    found = lora_facts(variants.source(), options)
    assert found["lora"]["gain"]["kept"] == pytest.approx((3.0 - lora) / 2.0)
    notes = [note for note in found["notes"] if "of the gain" in note]
    assert len(notes) == bool(says)
    assert not says or says in notes[0]


def test_names_and_options_that_do_not_go_together_are_refused(variants: Variants, tmp_path: Path) -> None:
    def refused(code: ErrorCode, says: str, *words: str) -> None:
        result = CliRunner().invoke(app, ["export", *words, "-o", str(tmp_path / "out")])
        assert isinstance(result.exception, GymError), result.output
        assert result.exception.code is code
        assert says in str(result.exception), str(result.exception)

    base, delta, store = str(variants.base), str(variants.delta), str(variants.store)
    usage = ErrorCode.USAGE
    refused(usage, "format huggingface has no --rank", delta, "--base", base, "--rank", "8")
    no_data = str(tmp_path / "rows.jsonl")
    refused(usage, "format huggingface has no --data", delta, "--base", base, "--data", no_data)
    refused(usage, "--base applies only to a .gymdelta file", base, "--base", base)
    refused(usage, "which already selects a variant", f"{base}:ada", "--variant", "bob")
    refused(usage, "--variants: no variant was selected", base, "--variants", store)
    refused(usage, "--variant cannot be combined with a .gymdelta", delta, "--variant", "ada")
    refused(usage, "its base 'base' is not on this machine", delta)
    refused(ErrorCode.NOT_FOUND, "bob", base, "--variant", "bob", "--variants", store)
    refused(ErrorCode.FILE_NOT_FOUND, "no such file", str(tmp_path / "no.gymdelta"), "--base", base)
    other = sibling("Llama", tmp_path / "other", seed=9)
    refused(ErrorCode.BASE_MISMATCH, "was made for base", delta, "--base", str(other))
    run(tmp_path / "run", model=base, max_steps=1)
    own = [str(tmp_path / "run"), "--format", "adapter", "--rank", "4", "--skip-check"]
    refused(usage, "has its own adapter", *own)
    assert not (tmp_path / "out").exists()
