"""Tiny random siblings of public models: the published class, config keys, tokenizer's ways and chat template.

``make_sibling("qwen3", folder)`` writes a model folder of a few ten thousand weights, in the files and under the names
that the model's repository has. Sizes are small; what decides how a model is handled is as published: head sizes that
do not divide the width, tied or untied words, key/value groups, windows, kinds of RoPE scaling, experts, vision parts,
bfloat16, words without a token behind the tokenizer's, several end tokens, a tokenizer without a padding token.

Chat templates are the repositories' own where TRL ships them (``templates.py`` lists the others, which are written
here by the published format).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from gym_fed.base.models import quiet_loading
from tests.support.siblings.family import Sibling
from tests.support.siblings.text import TEXT
from tests.support.siblings.vision import VISION

SIBLINGS: dict[str, Sibling] = {**TEXT, **VISION}
"""By kind: ``qwen3``, ``qwen3_moe``, ``llama3``, ..."""


def make_sibling(kind: str, folder: Path, *, seed: int = 0) -> Path:
    """Write the sibling ``kind`` into ``folder`` (made if absent), and return it."""
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

    sibling = SIBLINGS[kind]
    folder.mkdir(parents=True, exist_ok=True)
    ids = sibling.words.write(folder, sibling.template)
    values = sibling.config(ids)
    torch.manual_seed(seed)
    auto = AutoModelForImageTextToText if "vision_config" in values else AutoModelForCausalLM
    model: Any = auto.from_config(AutoConfig.for_model(**values))
    assert type(model).__name__ == values["architectures"][0]
    with quiet_loading():
        model.to(getattr(torch, sibling.dtype)).save_pretrained(folder)
    for name, content in {
        "config.json": {**values, "torch_dtype": sibling.dtype},
        "generation_config.json": {"do_sample": True, **sibling.generation(ids)},
        **({"preprocessor_config.json": sibling.pictures} if sibling.pictures else {}),
        **({"chat_template.json": {"chat_template": sibling.template}} if sibling.pictures else {}),
        **({"processor_config.json": sibling.processor} if sibling.processor else {}),
    }.items():
        (folder / name).write_text(json.dumps(content, indent=2), encoding="utf-8")
    return folder
