"""Models of `serving_peers.py`: layers of a 7B or SmolLM2, one-bit variants, and LoRA adapters."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from gym_quant.packing import packed_width
from torch import Tensor

from gym_fed.base.models import load_model
from gym_fed.delta.base import BaseSpec, model_tensors
from gym_fed.delta.encode import lora_delta
from gym_fed.delta.factors import lora_factors
from gym_fed.delta.writer import DeltaEntry, write_delta

RANK = 16
LORA_TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


@dataclass
class Base:
    """A model in bfloat16 with a tokenizer, saved in ``folder``."""

    name: str
    model: Any
    tokenizer: Any
    folder: Path
    spec: BaseSpec


def seven_b_layers(tokenizer: Path, folder: Path) -> None:
    """Two layers of a 7B with random weights in bfloat16, under a real tokenizer, for programs that need one."""
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

    taken = AutoTokenizer.from_pretrained(tokenizer)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(taken),
        hidden_size=4096,
        intermediate_size=11_008,
        num_hidden_layers=2,
        num_attention_heads=32,
        num_key_value_heads=32,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        eos_token_id=taken.eos_token_id,
        bos_token_id=taken.bos_token_id,
        dtype=torch.bfloat16,
    )
    model: Any = LlamaForCausalLM(config)
    model.to(dtype=torch.bfloat16).save_pretrained(folder)
    taken.save_pretrained(folder)


def saved(name: str, folder: Path) -> Base:
    """A model folder, such as SmolLM2's, in bfloat16."""
    loaded = load_model(str(folder), dtype="bfloat16")
    return Base(name, loaded.model, loaded.tokenizer, folder, described(loaded.model, folder))


def described(model: Any, folder: Path) -> BaseSpec:
    """The model folder for `gym api`; a base is identified by its float32 weights, whatever it is served in."""
    return BaseSpec.of({name: tensor.float() for name, tensor in model_tensors(model).items()}, folder.name)


def one_bit(base: Base, folder: Path, number: int) -> Path:
    """A full one-bit variant: random signs and one small scale a row for every matrix, embeddings and head too."""

    def scales(name: str, rows: int) -> Tensor:
        return torch.full((rows, 1), 1e-3)

    return random_signs(base.spec, folder / f"v{number}.gymdelta", 1000 + number, scales)


def random_signs(spec: BaseSpec, file: Path, seed: int, scales: Callable[[str, int], Tensor]) -> Path:
    """A delta of random signs for every matrix; ``scales`` gives a column by a matrix's name and rows."""
    generator = torch.Generator().manual_seed(seed)

    def payload(name: str, rows: int, cols: int) -> dict[str, Tensor]:
        bits = torch.randint(0, 256, (rows, packed_width(cols)), generator=generator, dtype=torch.uint8)
        return {"scales": scales(name, rows).to(torch.bfloat16), "bits": bits}

    if not file.exists():
        entries = [
            DeltaEntry(
                name,
                (rows, cols),
                "bitdelta",
                {"group_size": cols, "scale_dtype": "bfloat16"},
                partial(payload, name, rows, cols),
            )
            for name, shape in sorted(spec.shapes.items())
            if len(shape) == 2
            for rows, cols in [shape]
        ]
        write_delta(file, entries, spec)
    return file


def adapters(base: Base, folder: Path, count: int) -> list[tuple[Path, Path]]:
    """Distinct random LoRA adapters of rank 16 on all linear layers: PEFT's folder, and the same as a `.gymdelta`."""
    from peft import LoraConfig, get_peft_model

    made = [(folder / f"lora{number}", folder / f"lora{number}.gymdelta") for number in range(count)]
    if all(delta.exists() for _, delta in made):
        return made
    config = LoraConfig(r=RANK, lora_alpha=2 * RANK, target_modules=LORA_TARGETS, task_type="CAUSAL_LM")
    model: Any = get_peft_model(copy.deepcopy(base.model), config)
    for number, (peft_folder, delta) in enumerate(made):
        torch.manual_seed(2000 + number)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "lora_" in name:
                    parameter.normal_(0.0, 0.01)
        model.save_pretrained(str(peft_folder))
        lora_delta(lora_factors(model), delta, base.spec)
    return made
