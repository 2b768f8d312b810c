"""Exported programs work for any batch, length and padding, also beyond a window; and refusals."""

from __future__ import annotations

import errno
from importlib.resources import files
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers.utils.chat_template_utils import render_jinja_template

from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.export.formats._program import archive_file
from gym_fed.export.formats.base import Options
from gym_fed.export.formats.onnx import Onnx
from gym_fed.export.formats.openvino import OpenVino
from gym_fed.export.formats.torchscript import TorchScript
from gym_fed.export.gguf.write import metadata_of
from gym_fed.export.readers.program import ProgramExport, rendered
from gym_fed.export.run import export
from gym_fed.export.source import Source, open_source
from tests.support.adapters import sibling
from tests.support.places import places_in
from tests.support.siblings import make_sibling

WINDOW = 16


@pytest.fixture(scope="module")
def windowed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A base that sees ``WINDOW`` tokens back, with a licence."""
    base = sibling("Mistral", tmp_path_factory.mktemp("windowed") / "base", sliding_window=WINDOW)
    (base / "LICENSE").write_text("Apache-2.0")
    return base


@pytest.mark.parametrize(
    ("format", "name"),
    [
        pytest.param(
            "torch_export", "model.pt2", marks=pytest.mark.slow
        ),  # recorded as onnx's is, read slowly
        ("onnx", "model.onnx"),
    ],
)
def test_a_program_computes_what_the_model_does_beyond_its_window_and_padded(
    windowed: Path, tmp_path: Path, format: str, name: str
) -> None:
    record = export(open_source(str(windowed)), format, tmp_path / name, Options())
    found = record["check"]["read_back"]
    assert record["check"]["positions"] > 4 * WINDOW
    assert 0 < found["max"] <= 1e-5 * found["largest"]
    assert found["same_greedy_tokens"]
    there = {file.name for file in tmp_path.iterdir()}
    assert there == {name, f"{name}.export.json", f"{name}.card.md", f"{name}.LICENSE"}
    assert "no tokenizer" in record["notes"][0]
    assert places_in(tmp_path) == []


def test_a_folder_of_a_program_holds_the_merged_adapter_tokenizer_configs_and_licence(
    windowed: Path, tmp_path: Path
) -> None:
    source = open_source(str(windowed))
    lora = LoraConfig(r=2, target_modules=["q_proj", "up_proj"], init_lora_weights=False)
    source.model = get_peft_model(source.model, lora).eval()
    record = export(source, "torchscript", tmp_path / "out", Options())
    assert 0 < record["check"]["read_back"]["max"] <= 1e-5 * record["check"]["read_back"]["largest"]
    files = {file.name for file in (tmp_path / "out").iterdir()}
    assert {"model.pt", "tokenizer.json", "config.json", "generation_config.json", "LICENSE"} <= files


@pytest.mark.parametrize("reads_mask", [True, False])
def test_a_program_that_overlooks_padding_is_found_by_every_second_reading(
    windowed: Path, reads_mask: bool
) -> None:
    model = open_source(str(windowed)).model

    class Program(ProgramExport):
        def run(self, ids: Any, mask: Any) -> Any:
            seen = torch.from_numpy(mask if reads_mask else mask * 0 + 1)
            with torch.inference_mode():
                return model(input_ids=torch.from_numpy(ids), attention_mask=seen).logits.numpy()

    reading = Program(windowed)
    first, second = (reading.logits([5, 6, 7, 8]) for _ in range(2))
    assert torch.allclose(first, second, atol=1e-6) is reads_mask


def test_models_that_are_no_program_of_token_ids_are_refused_by_name() -> None:
    def refused(says: str, **config: Any) -> None:
        source = Source("other", SimpleNamespace(config=SimpleNamespace(**config)), None, None)
        with pytest.raises(GymError, match=says):
            Onnx().check(source)

    refused("format onnx: other reads images", vision_config={})
    refused("format onnx: other is a mixture of depths", model_type="gym_mixture_of_depths")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no disk that is always full")
def test_an_operator_that_torch_has_extended_is_read_as_it_was_recorded(tmp_path: Path) -> None:
    class Gelu(torch.nn.Module):
        def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> dict[str, torch.Tensor]:
            return {
                "logits": torch.nn.functional.gelu(input_ids * attention_mask.float(), approximate="tanh")
            }

    TorchScript().write_program(Gelu(), tmp_path / "model.pt", Options())
    read: Any = torch.jit.load(tmp_path / "model.pt")  # type: ignore[no-untyped-call]
    ids = torch.arange(6).reshape(2, 3)
    assert torch.equal(read(ids, torch.ones_like(ids))["logits"], Gelu()(ids, torch.ones_like(ids))["logits"])


def test_a_full_disk_is_an_error_of_an_archive_and_does_not_abort_the_process() -> None:
    def write() -> None:
        with archive_file(Path("/dev/full")) as archive:
            writer = torch._C.PyTorchFileWriter(archive)
            writer.write_record("weights", bytes(100_000), 100_000)
            del writer  # its destructor writes the end

    with pytest.raises(OSError, match=f"Errno {errno.ENOSPC}"):
        write()


def test_types_and_packages_that_are_not_there_are_refused_before_a_model_is_loaded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with pytest.raises(GymError, match="written in float32, not in bfloat16"):
        Onnx().require_options(Options(dtype="bfloat16"))
    monkeypatch.setattr("gym_fed.export.formats.base.find_spec", lambda name: None)
    with pytest.raises(GymError, match="format openvino needs openvino") as caught:
        OpenVino().require_options(Options())
    assert caught.value.code is ErrorCode.MISSING_DEPENDENCY
    assert caught.value.hint == "pip install openvino==2026.4.1"


def test_more_weights_than_one_onnx_file_holds_are_refused_or_lie_beside(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import numpy
    import onnx_ir

    monkeypatch.setattr("gym_fed.export.formats.onnx.MAX_INSIDE_BYTES", 1000)
    weights = onnx_ir.tensor(numpy.zeros(1001, numpy.float32), name="w")
    value = onnx_ir.Value(name="w", const_value=weights)
    graph = onnx_ir.Graph([], [], nodes=[], initializers=[value], opset_imports={"": 20}, name="g")
    program = onnx_ir.Model(graph, ir_version=10)
    Onnx().save(program, tmp_path / "model.onnx")
    assert (tmp_path / "model.onnx.data").stat().st_size >= 4004
    with pytest.raises(GymError, match="do not fit in one ONNX file"):
        Onnx().at(Path("model.onnx")).save(program, tmp_path / "other.onnx")  # type: ignore[attr-defined]


@pytest.mark.slow  # traces of half a minute each
@pytest.mark.parametrize("kind", ["qwen3_moe", "gemma3"])
@pytest.mark.parametrize("format", ["torchscript", "torch_export", "onnx"])
def test_experts_and_alternating_windows_are_the_same_at_other_shapes(
    tmp_path: Path, kind: str, format: str
) -> None:
    base = make_sibling(kind, tmp_path / "base")
    record = export(open_source(str(base)), format, tmp_path / "out", Options())
    assert record["check"]["read_back"]["same_greedy_tokens"]


@pytest.mark.slow  # a trace of half a minute
def test_int8_of_onnx_keeps_the_likeliest_token(tmp_path: Path) -> None:
    record = export(open_source("gym-nano"), "onnx", tmp_path / "model.onnx", Options(quantization="int8"))
    assert 0.95 <= record["check"]["read_back"]["top1"] <= 1
    assert 0 < record["check"]["read_back"]["kl"] < 0.05
    assert (tmp_path / "model.onnx").stat().st_size < 3_000_000  # of 2.4 million weights


@pytest.mark.slow  # minutes, and packages that no extra brings
@pytest.mark.parametrize("format", ["openvino", "executorch"])
def test_programs_of_other_runtimes_are_read_back_by_these(tmp_path: Path, format: str) -> None:
    pytest.importorskip(format, reason=f"needs pip install {format}")
    record = export(open_source("gym-nano"), format, tmp_path / "out", Options())
    assert record["check"]["read_back"]["max"] < 1e-3
    assert record["check"]["read_back"]["same_greedy_tokens"]


SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}
PUBLISHED = files("trl") / "chat_templates"
AS_JSON = "{{ bos_token }}{% for m in messages %}{{ m | tojson }}{{ tools is none }}{% endfor %}"


def published(name: str) -> str:
    return (PUBLISHED / f"{name}.jinja").read_text("utf-8")


@pytest.mark.parametrize("name", ["cohere2", "gptoss", "llama3_1", "qwen3_training", ""])
def test_a_message_is_rendered_as_transformers_does(name: str) -> None:
    template = published(name) if name else AS_JSON
    message = {"role": "user", "content": "<Über> 'a' & b"}
    wanted, _ = render_jinja_template(
        [[message]], chat_template=template, add_generation_prompt=True, **SPECIAL
    )
    assert rendered(template, message["content"], SPECIAL) == wanted[0]


def test_of_templates_by_name_a_gguf_file_is_compared_on_the_default_without_marks() -> None:
    tokenizer = MagicMock(bos_token_id=1, eos_token_id=2, pad_token_id=None, unk_token_id=0)
    tokenizer.tokenizer = tokenizer
    tokenizer.return_value = {"input_ids": [1, 5]}
    tokenizer.chat_template = {"default": "a{% generation %}b{% endgeneration %}", "tool_use": "c"}
    model = SimpleNamespace(generation_config=None)
    found = metadata_of(Source("named", model, tokenizer, None), 0)["tokenizer.chat_template"]
    assert found.startswith("a")
    assert "generation" not in found
