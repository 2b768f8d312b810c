"""Exported files in llama.cpp itself, by ``xllamacpp`` in an environment of its own.

``GYM_XLLAMACPP=PYTHON pytest -m slow tests/unit/export/test_gguf_xllamacpp.py`` with a Python that has ``xllamacpp``.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import AddedToken

from gym_fed.base.models import load_model
from gym_fed.export.formats.base import Options
from gym_fed.export.probe_texts import probe_texts
from gym_fed.export.run import export
from gym_fed.export.source import open_source
from tests.support.siblings import make_sibling

PYTHON = os.environ.get("GYM_XLLAMACPP", sys.executable)
SIDE = Path(__file__).parents[2] / "support/llama_cpp_answers.py"
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024, "rope_theta": 10000.0}
ROPES = {"yarn": YARN, "yarn with a factor": {**YARN, "attention_factor": 1.3}}
pytestmark = [
    pytest.mark.slow,  # a conversion takes 10 s on one core
    pytest.mark.skipif(
        subprocess.run([PYTHON, "-c", "import xllamacpp"], capture_output=True, check=False).returncode != 0,
        reason="no xllamacpp; $GYM_XLLAMACPP names a Python that has it",
    ),
]


def _source(kind: str, folder: Path) -> Path:
    """Write a model with the added token ``§5A``; ``KIND:SCALING`` has this RoPE scaling."""
    kind, _, scaling = kind.partition(":")
    base = make_sibling(kind, folder / "base")
    if scaling:
        config = json.loads((base / "config.json").read_text())
        config = {key: value for key, value in config.items() if key not in ("rope_scaling", "rope_theta")}
        (base / "config.json").write_text(json.dumps({**config, "rope_parameters": ROPES[scaling]}))
    loaded = load_model(str(base))
    loaded.tokenizer.add_tokens([AddedToken("§5A", normalized=False)])
    loaded.model.resize_token_embeddings(len(loaded.tokenizer), mean_resizing=False)
    loaded.model.save_pretrained(folder / "model")
    loaded.tokenizer.save_pretrained(folder / "model")
    return folder / "model"


def _answers(file: Path, job: dict[str, Any]) -> dict[str, Any]:
    done = subprocess.run(
        [PYTHON, str(SIDE), str(file)], input=json.dumps(job), capture_output=True, text=True, check=True
    )
    answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return answer


@pytest.mark.parametrize(
    "kind",
    ["llama3", "llama3:yarn", "llama3:yarn with a factor", "qwen3", "phi4_mini", "qwen3_moe", "mixtral"],
)
def test_llama_cpp_reads_the_texts_and_the_scaling_as_the_source_does(kind: str, tmp_path: Path) -> None:
    source = open_source(str(_source(kind, tmp_path)))
    texts = probe_texts(source.tokenizer)
    ids = [5 + number * 7 % 60 for number in range(200)]
    with torch.inference_mode():
        expected = source.model(input_ids=torch.tensor([ids])).logits[0, -1].log_softmax(-1)
    expected_ids = [source.tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts]
    export(source, "gguf", tmp_path / "m.gguf", Options(quantization="f32"))
    answer = _answers(tmp_path / "m.gguf", {"texts": texts, "ids": ids, "probabilities": 20})
    others = [
        text for text, ours, theirs in zip(texts, expected_ids, answer["ids"], strict=True) if ours != theirs
    ]
    assert others == []
    for number, logprob in answer["logprobs"].items():
        assert abs(float(expected[int(number)]) - logprob) < 2e-3, number
    assert len(answer["logprobs"]) == 20
