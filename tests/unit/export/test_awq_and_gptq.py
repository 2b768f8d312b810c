"""AWQ and GPTQ by auto-round: files, calibration, reading back, and refusals."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from gym_fed.base.imports.quantised import plain_tensors
from gym_fed.base.imports.stored import StoredTensors
from gym_fed.base.models import load_tokenizer
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.export.formats._few_bits import (
    ITERATIONS,
    LENGTH,
    OWN,
    SAMPLES,
    calibration_of,
    compare_packed,
)
from gym_fed.export.formats.base import Options
from gym_fed.export.run import export
from gym_fed.export.source import open_source
from tests.support.adapters import sibling

SIZES: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 96, "tie_word_embeddings": True}


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tied model of one layer, whose inputs are 64 and 96 wide: groups of 32 fit all."""
    return sibling("Llama", tmp_path_factory.mktemp("wide") / "base", **SIZES)


def written(folder: Path) -> dict[str, torch.Tensor]:
    section = json.loads((folder / "config.json").read_text())["quantization_config"]
    with StoredTensors(folder) as tensors:
        return dict(plain_tensors(tensors, section))


@pytest.mark.slow  # auto-round imports for 8 seconds in a process of its own
@pytest.mark.parametrize(("format", "quantization"), [("awq", "w4"), ("gptq", "w4"), ("gptq", "w8_rtn")])
def test_packed_weights_are_within_a_step_of_the_source(
    wide: Path, tmp_path: Path, format: str, quantization: str
) -> None:
    source = open_source(str(wide))
    record = export(source, format, tmp_path / "out", Options(quantization=quantization), check=False)
    calibrated = not quantization.endswith("_rtn")
    assert record["group_size"] == 32
    assert ("calibration" in record) is calibrated
    assert "lm_head.weight" not in written(tmp_path / "out")
    steps = 2 ** int(quantization[1]) - 1
    state, packed = source.model.state_dict(), 0
    for name, value in written(tmp_path / "out").items():
        if not name.endswith("_proj.weight"):
            torch.testing.assert_close(value.float(), state[name], rtol=2**-10, atol=1e-6)
            continue
        groups = state[name].reshape(-1, 32)
        most = groups.abs().amax(1, keepdim=True) * 2 / steps  # a step, of a symmetric range
        off = (value.float() - state[name]).reshape(-1, 32).abs() / most
        assert calibrated or off.max() < 1.6, name  # calibration also cuts the range of a group
        assert off.mean() < 0.5, name
        packed += 1
    assert packed == 7
    assert compare_packed(tmp_path / "out", source.model, 0.35)["compared"] == len(state) - 1


@pytest.mark.slow  # three processes that import torch, and one of them auto-round
@pytest.mark.parametrize("format", ["awq", "gptq"])
def test_calibration_keeps_what_rounding_to_the_nearest_loses(format: str, tmp_path: Path) -> None:
    said: list[str] = []
    options = Options(report=lambda stage, done, total: said.append(f"{stage} {done}/{total}"))
    record = export(open_source("gym-nano"), format, tmp_path / "out", options)
    # Rounded to the nearest, gym-nano is 0.1 nats off.
    assert record["check"]["read_back"]["kl"] < 0.05
    assert record["rounding"] == f"SignRound, {ITERATIONS} iterations"
    assert record["calibration"]["source"] == OWN
    assert "quantising blocks 3/4" in said


@pytest.mark.slow  # the whole of an export: auto-round's own unpacking is imported, too
@pytest.mark.parametrize("format", ["awq", "gptq"])
def test_our_reader_agrees_with_what_auto_round_unpacks(wide: Path, tmp_path: Path, format: str) -> None:
    from auto_round.export.export_to_awq.utils import dequantize_gemm
    from auto_round.utils.bit_packing import unpack_bitstream

    export(open_source(str(wide)), format, tmp_path / "out", Options(quantization="w4_rtn"), check=False)
    found = written(tmp_path / "out")
    with StoredTensors(tmp_path / "out") as tensors:
        for name in [one.removesuffix(".qweight") for one in tensors if one.endswith(".qweight")]:
            qweight, qzeros, scales = (tensors[f"{name}.{part}"] for part in ("qweight", "qzeros", "scales"))
            if format == "awq":
                theirs = dequantize_gemm(qweight, qzeros, scales, 4, 32)
            else:
                zeros = (unpack_bitstream(qzeros, 4, 1) + 1).repeat_interleave(32, 0)
                theirs = (unpack_bitstream(qweight, 4, 0) - zeros) * scales.repeat_interleave(32, 0)
            assert torch.equal(found[f"{name}.weight"], theirs.T.half()), name


def test_own_texts_calibrate_with_samples_of_one_length_always_the_same() -> None:
    tokenizer = load_tokenizer("gym-nano")
    found = calibration_of(tokenizer, 256)
    assert found.source == OWN
    assert [len(ids) for ids in found.ids] == [LENGTH] * SAMPLES
    assert calibration_of(tokenizer, 256).record() == found.record()
    assert {len(ids) for ids in calibration_of(tokenizer, 40).ids} == {40}


def test_rows_calibrate_as_the_model_reads_them() -> None:
    tokenizer = load_tokenizer("gym-nano")
    messages = [{"role": "user", "content": "ab" * 90}, {"role": "assistant", "content": "c"}]
    rows = [{"text": "x" * 90}, {"messages": messages}]
    found = calibration_of(tokenizer, 256, rows, "mine.jsonl")
    assert found.record()["source"] == "mine.jsonl"
    text = tokenizer.decode([token for ids in found.ids for token in ids])
    template = tokenizer.apply_chat_template(messages, tokenize=False)
    assert text.startswith("x" * 90)
    assert template[:30] in text


def test_too_few_tokens_are_refused_with_the_numbers() -> None:
    with pytest.raises(
        GymError, match=r"short.jsonl: 3 tokens for calibration, but at least 128 are required"
    ) as caught:
        calibration_of(load_tokenizer("gym-nano"), 256, [{"text": "ab"}], "short.jsonl")
    assert caught.value.code is ErrorCode.DATA_INVALID


@pytest.mark.parametrize(
    ("quantization", "rows", "says"),
    [
        ("w4g128", 0, r"w4g128: model.layers.0.self_attn.q_proj of .* has 64 inputs, not a multiple of 128"),
        ("w4g64", 0, r"down_proj of .* has 96 inputs, not a multiple of 64"),
        ("w8", 0, "format awq has no quantization w8"),
        ("w4_rtn", 1, "w4_rtn rounds to nearest, without calibration"),
    ],
)
def test_what_does_not_fit_is_refused_before_auto_round_starts(
    wide: Path, tmp_path: Path, quantization: str, rows: int, says: str
) -> None:
    options = replace(Options(quantization=quantization), rows=[{"text": "a"}] * rows)
    with pytest.raises(GymError, match=says) as caught:
        export(open_source(str(wide)), "awq", tmp_path / "out", options)
    assert caught.value.code is ErrorCode.USAGE
    assert list(tmp_path.iterdir()) == []


def test_a_model_of_narrow_layers_is_refused(tmp_path: Path) -> None:
    narrow = sibling("Llama", tmp_path / "narrow")
    with pytest.raises(GymError, match="no linear layer whose sizes are multiples of 32"):
        export(open_source(str(narrow)), "gptq", tmp_path / "out", Options())
