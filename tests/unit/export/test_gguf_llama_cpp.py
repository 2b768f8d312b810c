"""GGUF files in llama.cpp itself, beside what its own quantiser makes of the same weights.

``PYTHONPATH=FOLDER pytest -m slow`` with a FOLDER that llama-cpp-python was installed into; SmolLM2 takes part where
``$GYM_SMOLLM2``, or ``runs/smollm2`` (``benchmarks/_smollm2.py`` writes it), has SmolLM2-135M-Instruct.
"""

from __future__ import annotations

import ctypes
import os
from pathlib import Path
from typing import Any

import pytest

from gym_fed.export.checking import compared
from gym_fed.export.formats.base import Options
from gym_fed.export.formats.gguf import Gguf
from gym_fed.export.gguf.convert import FILE_TYPES
from gym_fed.export.gguf.probes import probes
from gym_fed.export.readers.gguf import LlamaCppExport
from gym_fed.export.readers.reading import PASSAGE, POSITIONS
from gym_fed.export.readers.transformers import TransformersExport
from gym_fed.export.run import export
from gym_fed.export.source import Source, open_source
from tests.support.siblings import make_sibling

llama_cpp = pytest.importorskip("llama_cpp", reason="llama-cpp-python is not installed")
pytestmark = pytest.mark.slow  # a conversion and an answer take 15 s on one core, of SmolLM2 a minute
ALL = tuple(Gguf.quantizations)


@pytest.fixture(scope="module")
def smollm2() -> Source:
    folder = Path(os.environ.get("GYM_SMOLLM2", "runs/smollm2"))
    if not (folder / "config.json").is_file():
        pytest.skip(f"{folder}: no SmolLM2-135M-Instruct; name its folder in $GYM_SMOLLM2")
    return open_source(str(folder))


@pytest.fixture(scope="module")
def smollm2_f32(smollm2: Source, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its float32 file, from which llama.cpp quantises."""
    file = tmp_path_factory.mktemp("smollm2") / "f32.gguf"
    record = export(smollm2, "gguf", file, Options(quantization="f32"))
    assert record["check"]["read_back"]["same_greedy_tokens"], "32 greedy tokens"
    assert "llama-cpp-python" in record["check"]["read_by"]
    return file


def quantised(file: Path, quantization: str, target: Path) -> Path:
    """What llama.cpp's own quantiser makes of a float32 file."""
    import gguf

    options = llama_cpp.llama_model_quantize_default_params()
    options.ftype = int(getattr(gguf.LlamaFileType, FILE_TYPES[quantization]))
    assert (
        llama_cpp.llama_model_quantize(str(file).encode(), str(target).encode(), ctypes.byref(options)) == 0
    )
    return target


def tensors(file: Path) -> dict[str, tuple[str, bytes]]:
    import gguf

    return {one.name: (one.tensor_type.name, one.data.tobytes()) for one in gguf.GGUFReader(file).tensors}


@pytest.mark.parametrize("quantization", [name for name in ALL if name != "f32"])
def test_smollm2_is_quantised_as_llama_cpps_own_quantiser_does(
    smollm2: Source, smollm2_f32: Path, quantization: str, tmp_path: Path
) -> None:
    record = export(smollm2, "gguf", tmp_path / "ours.gguf", Options(quantization=quantization))
    ours = tensors(tmp_path / "ours.gguf")
    theirs = tensors(quantised(smollm2_f32, quantization, tmp_path / "theirs.gguf"))
    assert {name: kind for name, (kind, _) in ours.items()} == {
        name: kind for name, (kind, _) in theirs.items()
    }
    ids = list(smollm2.tokenizer(PASSAGE)["input_ids"])[:POSITIONS]
    wanted = {"logits.passage": LlamaCppExport(str(smollm2_f32)).logits(ids), "greedy": _none()}
    loss = {
        name: compared(
            wanted,
            {"logits.passage": LlamaCppExport(str(tmp_path / f"{name}.gguf")).logits(ids), "greedy": _none()},
        )["kl"]
        for name in ("ours", "theirs")
    }
    assert loss["ours"] <= 1.02 * loss["theirs"] + 1e-7, loss
    assert record["check"]["read_back"]["same_token_ids"]


def _none() -> Any:
    import torch

    return torch.zeros(0)


@pytest.mark.parametrize("kind", ["gym-nano", "qwen3", "mistral", "gemma3", "llama3"])
@pytest.mark.parametrize("quantization", ["f32", "q8_0"])
def test_llama_cpp_reads_other_families_with_their_own_token_ids_and_answers(
    kind: str, quantization: str, tmp_path: Path
) -> None:
    name = kind if kind == "gym-nano" else str(make_sibling(kind, tmp_path / kind))
    source = open_source(name)
    record = export(source, "gguf", tmp_path / "model.gguf", Options(quantization=quantization))
    back = record["check"]["read_back"]
    assert back["same_token_ids"]
    assert back["same_passage_ids"]
    assert back["same_special_tokens"]
    assert back["same_greedy_tokens"] or quantization != "f32"


@pytest.mark.parametrize("kind", ["gym-nano", "mistral", "gemma3", "llama3", "smollm2"])
def test_llama_cpp_gives_probes_the_ids_that_the_source_gives(kind: str, tmp_path: Path) -> None:
    name = kind if kind == "gym-nano" else str(make_sibling(kind, tmp_path / kind))
    source = open_source(name)
    export(source, "gguf", tmp_path / "model.gguf", Options(), check=False)
    ours, theirs = TransformersExport(None, source.tokenizer), LlamaCppExport(str(tmp_path / "model.gguf"))
    texts = [text for text in probes()[::20] if text == _composed(text)]
    other = [text for text in texts if ours.text_ids(text) != theirs.text_ids(text)]
    assert len(texts) > 400
    assert not other, (len(other), other[:5])


def _composed(text: str) -> str:
    """As tokenizers with NFC read it, and llama.cpp does not."""
    import unicodedata

    return unicodedata.normalize("NFC", text)
