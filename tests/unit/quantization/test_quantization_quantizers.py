"""The quantisers on a small Llama: the file they write, what they report, and what they refuse."""

from __future__ import annotations

import copy
import io
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from gym_fed.base.models import load_tokenizer
from gym_fed.core import progress
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.delta.base import BaseSpec
from gym_fed.delta.encode import lora_delta
from gym_fed.delta.file import DeltaFile
from gym_fed.quantization import (
    BitDeltaConfig,
    BitDeltaQuantizer,
    DeltaQuantConfig,
    DeltaQuantizer,
    QuantMethod,
    QuantReport,
)
from gym_fed.quantization.tensor_reports import tensor_reports

EMBEDDINGS, NORM = "model.embed_tokens.weight", "model.norm.weight"
MATRIX = "model.layers.1.mlp.down_proj.weight"
QUICK: dict[str, Any] = {"distill_steps": 8, "calibration_samples": 16, "max_length": 24}


def llama(seed: int = 0) -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=512,
        hidden_size=24,
        intermediate_size=44,
        num_hidden_layers=2,
        num_attention_heads=2,
        tie_word_embeddings=True,
    )
    torch.manual_seed(seed)
    return LlamaForCausalLM(config).eval()


def fine_tune(base: LlamaForCausalLM, size: float = 0.02) -> LlamaForCausalLM:
    tuned = copy.deepcopy(base)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in tuned.parameters():
            parameter += size * torch.randn(parameter.shape, generator=generator)
    return tuned


@pytest.fixture
def base() -> LlamaForCausalLM:
    return llama()


@pytest.fixture
def tuned(base: LlamaForCausalLM) -> LlamaForCausalLM:
    return fine_tune(base)


@pytest.fixture
def ids() -> Tensor:
    return torch.randint(512, (16, 24), generator=torch.Generator().manual_seed(2))


def weights(model: torch.nn.Module) -> dict[str, Tensor]:
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def by_name(report: QuantReport) -> dict[str, Any]:
    return {tensor.name: tensor for tensor in report.tensors}


def test_bitdelta_writes_an_ordinary_delta_that_applies(
    base: LlamaForCausalLM, tuned: LlamaForCausalLM, ids: Tensor, tmp_path: Path
) -> None:
    before, out = weights(base), tmp_path / "variant.gymdelta"
    report = BitDeltaQuantizer(BitDeltaConfig(**QUICK)).quantize(base, tuned, calibration=ids, out=out)
    assert all(torch.equal(w, before[n]) for n, w in weights(base).items()), "the base changed"
    with DeltaFile.open(out, BaseSpec.of(base, "LlamaForCausalLM")) as delta:
        assert delta.sha256() == report.sha256
        assert delta.bits_per_weight == pytest.approx(report.bits_per_weight)
        codecs = {name: delta.record(name).codec for name in delta.names}
    assert (codecs[MATRIX], codecs[EMBEDDINGS], codecs[NORM]) == ("bitdelta", "bitdelta", "dense")
    applied = BitDeltaQuantizer.apply(base, out)
    assert applied is base
    for name, weight in weights(base).items():
        lost = float((weight - weights(tuned)[name]).norm() / (weights(tuned)[name] - before[name]).norm())
        assert lost == pytest.approx(by_name(report)[name].error, abs=1e-3), name


def test_the_command_line_reads_the_file(
    base: LlamaForCausalLM, tuned: LlamaForCausalLM, tmp_path: Path
) -> None:
    out = tmp_path / "variant.gymdelta"
    BitDeltaQuantizer(BitDeltaConfig(distill_steps=0)).quantize(base, tuned, out=out)
    code = "from gym_fed.cli.main import main; main()"
    shown = subprocess.run(
        [sys.executable, "-c", code, "delta", "show", str(out), "--json"], check=True, capture_output=True
    )
    assert {t["codec"] for t in json.loads(shown.stdout)["tensors"]} == {"bitdelta", "dense"}


@pytest.mark.parametrize(
    ("embeddings", "codec", "scales"),
    [
        ("int8", "int8", (512, 1)),
        ("int4", "int4", (512, 1)),
        ("bitdelta-row", "bitdelta", (512, 1)),
        ("bitdelta", "bitdelta", (1,)),
        ("dense", "dense", None),
    ],
)
@pytest.mark.parametrize("norms", ["dense", "int8", "bitdelta"])
def test_embeddings_and_norms_get_the_codecs_asked_for(
    base: LlamaForCausalLM,
    tuned: LlamaForCausalLM,
    tmp_path: Path,
    embeddings: Any,
    codec: str,
    scales: tuple[int, ...] | None,
    norms: Any,
) -> None:
    config = BitDeltaConfig(embeddings=embeddings, norms=norms, distill_steps=0)
    BitDeltaQuantizer(config).quantize(base, tuned, out=tmp_path / "d.gymdelta")
    with BitDeltaQuantizer.load(tmp_path / "d.gymdelta", base) as delta:
        assert delta.record(EMBEDDINGS).codec == codec
        found = delta.payload(EMBEDDINGS).get("scales")
        assert (None if found is None else tuple(found.shape)) == scales
        assert delta.record(NORM).codec == norms
        del found


@pytest.mark.parametrize(("group", "scales"), [(None, (1,)), ("row", (24, 1)), (16, (24, 3))])
def test_scales_are_per_tensor_row_or_group(
    base: LlamaForCausalLM, tuned: LlamaForCausalLM, tmp_path: Path, group: Any, scales: tuple[int, ...]
) -> None:
    config = BitDeltaConfig(group_size=group, distill_steps=0, scale_dtype="float32")
    BitDeltaQuantizer(config).quantize(base, tuned, out=tmp_path / "d.gymdelta")
    with BitDeltaQuantizer.load(tmp_path / "d.gymdelta") as delta:
        found = delta.payload(MATRIX)["scales"].clone()
    change = (weights(tuned)[MATRIX] - weights(base)[MATRIX]).abs()
    wanted = {None: change.mean().reshape(1), "row": change.mean(1, keepdim=True)}.get(group)
    assert tuple(found.shape) == scales
    assert wanted is None or torch.allclose(found, wanted, rtol=1e-5)


def test_distillation_lowers_the_loss_and_the_same_seed_gives_the_same_bytes(
    base: LlamaForCausalLM, tuned: LlamaForCausalLM, ids: Tensor, tmp_path: Path
) -> None:
    config = BitDeltaConfig(**QUICK, group_size="row", distill_bits=True)
    reports = [
        BitDeltaQuantizer(config).quantize(base, tuned, calibration=ids, out=tmp_path / name)
        for name in ("a.gymdelta", "b.gymdelta")
    ]
    assert (tmp_path / "a.gymdelta").read_bytes() == (tmp_path / "b.gymdelta").read_bytes()
    found = reports[0].distillation
    assert found is not None
    assert found.loss_after < found.loss_before
    other = config.model_copy(update={"seed": 1})
    third = BitDeltaQuantizer(other).quantize(base, tuned, calibration=ids, out=tmp_path / "c.gymdelta")
    assert third.sha256 != reports[0].sha256


def test_a_terminal_gets_a_progress_bar_and_a_pipe_gets_nothing(
    base: LlamaForCausalLM,
    tuned: LlamaForCausalLM,
    ids: Tensor,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    printed = []
    for terminal in (True, False):
        screen = io.StringIO()
        monkeypatch.setattr(progress, "err", Console(file=screen, force_terminal=terminal, width=100))
        config = BitDeltaConfig(**QUICK)
        BitDeltaQuantizer(config).quantize(base, tuned, calibration=ids, out=tmp_path / "d.gymdelta")
        printed.append(screen.getvalue())
    assert "distilling scales" in printed[0]
    assert printed[1] == ""


def test_texts_and_conversations_calibrate_the_embedded_model_by_name(tmp_path: Path) -> None:
    from gym_fed.base.models import load_model

    tuned = fine_tune(load_model("gym-nano").model, 0.002)
    chat = [{"role": "user", "content": "reverse: abc"}, {"role": "assistant", "content": "cba"}]
    config = BitDeltaConfig(distill_steps=2, max_length=32)
    report = BitDeltaQuantizer(config).quantize(
        "gym-nano",
        tuned,
        calibration=[{"text": "a few words"}, {"messages": chat}],
        out=tmp_path / "d.gymdelta",
    )
    assert report.distillation is not None
    assert BitDeltaQuantizer.apply("gym-nano", tmp_path / "d.gymdelta").config.vocab_size


def test_text_without_a_tokenizer_is_refused_and_taken_with_one(
    base: LlamaForCausalLM, tuned: LlamaForCausalLM, tmp_path: Path
) -> None:
    quantizer, text = BitDeltaQuantizer(BitDeltaConfig(**QUICK)), ["one two three four five"]
    with pytest.raises(GymError, match="no tokenizer"):
        quantizer.quantize(base, tuned, calibration=text, out=tmp_path / "d.gymdelta")
    tokenizer = load_tokenizer("gym-nano")
    big = llama()
    big.resize_token_embeddings(len(tokenizer))
    assert quantizer.quantize(
        big, fine_tune(big), calibration=text, tokenizer=tokenizer, out=tmp_path / "d.gymdelta"
    ).distillation


def test_distillation_without_text_is_refused_with_the_remedy(
    base: LlamaForCausalLM, tuned: LlamaForCausalLM, tmp_path: Path
) -> None:
    with pytest.raises(GymError, match="calibration=") as caught:
        BitDeltaQuantizer().quantize(base, tuned, out=tmp_path / "d.gymdelta")
    assert caught.value.code is ErrorCode.CONFIG_INVALID
    assert not list(tmp_path.iterdir())


def test_a_tensor_that_did_not_change_is_not_in_the_file(base: LlamaForCausalLM, tmp_path: Path) -> None:
    tuned = copy.deepcopy(base)
    with torch.no_grad():
        tuned.get_parameter(MATRIX).add_(0.01)
    report = BitDeltaQuantizer(BitDeltaConfig(distill_steps=0)).quantize(base, tuned, out=tmp_path / "d")
    assert [t.name for t in report.tensors if t.codec] == [MATRIX]
    with BitDeltaQuantizer.load(tmp_path / "d", base) as delta:
        assert delta.names == (MATRIX,)


def test_another_architecture_and_broken_values_are_refused_by_the_tensors_name(
    base: LlamaForCausalLM, tuned: LlamaForCausalLM, tmp_path: Path
) -> None:
    quantizer = BitDeltaQuantizer(BitDeltaConfig(distill_steps=0))
    with pytest.raises(GymError, match="model_type: qwen3 -> llama"):
        quantizer.quantize("gym-nano", tuned, out=tmp_path / "d")
    with pytest.raises(GymError, match="in the tuned model"):
        quantizer.quantize("gym-nano", tuned, out=tmp_path / "d", allow_differences=True)
    with torch.no_grad():
        tuned.get_parameter(MATRIX)[0, 0] = float("nan")
    with pytest.raises(GymError, match=MATRIX):
        quantizer.quantize(base, tuned, out=tmp_path / "d")


@pytest.mark.parametrize("method", list(QuantMethod))
@pytest.mark.parametrize("per_channel", [True, False])
def test_deltaquant_agrees_with_its_codec_on_matrices(
    base: LlamaForCausalLM,
    tuned: LlamaForCausalLM,
    tmp_path: Path,
    method: QuantMethod,
    per_channel: bool,
) -> None:
    config = DeltaQuantConfig(
        method=method, per_channel=per_channel, calibration_samples=0, scale_dtype="float32"
    )
    DeltaQuantizer(config).quantize(base, tuned, out=tmp_path / "d.gymdelta")
    change = weights(tuned)[MATRIX] - weights(base)[MATRIX]
    with DeltaQuantizer.load(tmp_path / "d.gymdelta", base) as delta:
        decoded, payload = delta.decode(MATRIX), delta.payload(MATRIX)
        scales = payload["scales"].clone()
        del payload
    assert tuple(scales.shape) == ((24, 1) if per_channel else (1,))
    assert torch.allclose(decoded, straight(method, change, scales), atol=1e-7)


def straight(method: QuantMethod, change: Tensor, scales: Tensor) -> Tensor:
    """Dequantised values from given scales: the nearest level, in plain torch."""
    if method is QuantMethod.BINARY:
        return torch.where(change >= 0, 1.0, -1.0) * scales
    if method is QuantMethod.TERNARY:
        return torch.sign(change) * (change.abs() > scales / 2) * scales
    bits = int(method.value.removeprefix("int"))
    low, high = -(2 ** (bits - 1)), 2 ** (bits - 1) - 1
    return torch.clamp(torch.round(change / scales), low, high) * scales


def test_int8_rows_have_the_scale_of_their_largest_value(
    base: LlamaForCausalLM, tuned: LlamaForCausalLM, tmp_path: Path
) -> None:
    config = DeltaQuantConfig(method=QuantMethod.INT8, calibration_samples=0, scale_dtype="float32")
    DeltaQuantizer(config).quantize(base, tuned, out=tmp_path / "d.gymdelta")
    change = weights(tuned)[MATRIX] - weights(base)[MATRIX]
    with DeltaQuantizer.load(tmp_path / "d.gymdelta") as delta:
        assert torch.allclose(
            delta.payload(MATRIX)["scales"], change.abs().amax(1, keepdim=True) / 127, rtol=1e-6
        )


def test_calibration_trades_the_error_of_weights_for_that_of_outputs(
    base: LlamaForCausalLM, ids: Tensor, tmp_path: Path
) -> None:
    with torch.no_grad():  # a few input channels that carry nearly everything
        base.model.layers[1].post_attention_layernorm.weight[:3] *= 30
    tuned = fine_tune(base)
    errors = []
    for samples in (0, 16):
        config = DeltaQuantConfig(method=QuantMethod.INT2, calibration_samples=samples)
        report = DeltaQuantizer(config).quantize(base, tuned, calibration=ids, out=tmp_path / "d")
        errors.append(by_name(report)["model.layers.1.mlp.up_proj.weight"])
    assert errors[0].output_error is None
    assert errors[1].output_error < errors[1].error
    assert errors[1].error > errors[0].error


def test_a_byte_budget_is_kept_and_spent(
    base: LlamaForCausalLM, tuned: LlamaForCausalLM, ids: Tensor, tmp_path: Path
) -> None:
    out = tmp_path / "d.gymdelta"
    losses = []
    for budget in (4.0, 6.5):
        config = DeltaQuantConfig(
            method=QuantMethod.INT8, max_bits_per_weight=budget, calibration_samples=16, norms="bitdelta"
        )
        report = DeltaQuantizer(config).quantize(base, tuned, calibration=ids, out=out)
        assert 0.75 * budget < report.bits_per_weight <= budget
        assert out.stat().st_size == report.size_bytes
        losses.append(sum(t.error for t in report.tensors))
    assert losses[1] < losses[0]
    too_small = DeltaQuantConfig(method=QuantMethod.INT8, max_bits_per_weight=0.5)
    with pytest.raises(GymError, match=r"max_bits_per_weight: 0\.5 is .* bytes"):
        DeltaQuantizer(too_small).quantize(base, tuned, calibration=ids, out=out)


def test_deltaquant_without_calibration_text_is_refused_with_the_remedy(
    base: LlamaForCausalLM, tuned: LlamaForCausalLM, tmp_path: Path
) -> None:
    with pytest.raises(GymError, match="calibration_samples=0"):
        DeltaQuantizer().quantize(base, tuned, out=tmp_path / "d.gymdelta")


def test_layers_that_stray_from_the_aligned_subspace_are_projected_and_reported(
    base: LlamaForCausalLM, tuned: LlamaForCausalLM, tmp_path: Path
) -> None:
    unaligned = copy.deepcopy(base)
    straying = "model.layers.0.mlp.up_proj.weight"
    with torch.no_grad():
        for name, parameter in unaligned.named_parameters():
            if parameter.ndim == 2:
                parameter -= torch.eye(*parameter.shape) if name != straying else 0.0
        unaligned.get_parameter(straying)[0, 0] -= 1.0  # alignment only ever moved this layer's first output
    config = BitDeltaConfig(
        distill_steps=0,
        safety_threshold=0.6,
        safety_projection="exact",
        group_size="row",
        scale_dtype="float32",
    )
    report = BitDeltaQuantizer(config).quantize(
        base, tuned, aligned=base, unaligned=unaligned, out=tmp_path / "d.gymdelta"
    )
    assert report.safety == "applied"
    layers = {layer.name: layer for layer in report.layers}
    assert EMBEDDINGS not in layers
    assert layers[straying].replaced
    assert not layers["model.layers.0.mlp.down_proj.weight"].replaced
    with BitDeltaQuantizer.load(tmp_path / "d.gymdelta", base) as delta:
        written = delta.decode(straying)
    assert float(written[0].norm()) > 0.05
    assert float(written[1:].abs().max()) < 1e-6


def test_the_aligned_model_is_the_base_unless_given(
    base: LlamaForCausalLM, tuned: LlamaForCausalLM, tmp_path: Path
) -> None:
    unaligned = copy.deepcopy(base)
    with torch.no_grad():
        for parameter in unaligned.parameters():
            parameter[0] += 1.0
    quantizer = BitDeltaQuantizer(BitDeltaConfig(distill_steps=0, safety_threshold=0.9))
    named = quantizer.quantize(
        base, tuned, aligned=base, unaligned=unaligned, out=tmp_path / "named.gymdelta"
    )
    found = quantizer.quantize(base, tuned, unaligned=unaligned, out=tmp_path / "default.gymdelta")
    assert found.safety == "applied"
    assert found.layers == named.layers
    assert found.sha256 == named.sha256
    assert any(layer.replaced for layer in found.layers)


def test_without_an_unaligned_model_safety_is_not_applicable_and_a_threshold_is_an_error(
    base: LlamaForCausalLM, tuned: LlamaForCausalLM, tmp_path: Path
) -> None:
    plain = BitDeltaConfig(distill_steps=0)
    report = BitDeltaQuantizer(plain).quantize(base, tuned, out=tmp_path / "d")
    assert report.safety.startswith("not applicable: no unaligned model")
    report = BitDeltaQuantizer(plain).quantize(base, tuned, aligned=base, unaligned=tuned, out=tmp_path / "d")
    assert report.safety == "not applicable: safety_threshold is not set"
    strict = BitDeltaQuantizer(plain.model_copy(update={"safety_threshold": 0.5}))
    with pytest.raises(GymError, match="no unaligned model was given"):
        strict.quantize(base, tuned, aligned=base, out=tmp_path / "d")


def test_a_changed_tensor_that_is_not_in_the_file_counts_as_an_error_of_all_of_it(
    base: LlamaForCausalLM, tuned: LlamaForCausalLM, tmp_path: Path
) -> None:
    old, new = dict(base.named_parameters()), dict(tuned.named_parameters())
    deltas = {name: (new[name] - old[name]).detach() for name in old}
    deltas["model.layers.0.input_layernorm.weight"].zero_()
    factors = {MATRIX: (torch.ones(1, deltas[MATRIX].shape[1]), torch.ones(deltas[MATRIX].shape[0], 1), 1.0)}
    written = lora_delta(factors, tmp_path / "d", BaseSpec.of(base, "base"))
    rows = {tensor.name: tensor for tensor in tensor_reports(tmp_path / "d", written, deltas, {})}
    assert rows[MATRIX].codec == "lora"
    assert (rows[NORM].codec, rows[NORM].error) == (None, 1.0)
    assert rows["model.layers.0.input_layernorm.weight"].error == 0.0
