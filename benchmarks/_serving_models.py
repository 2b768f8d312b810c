"""Models of `serving.py`: a model with 7B-like layers or SmolLM2, its one-bit variants, and LoRA adapters."""

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


@dataclass(frozen=True)
class Sizes:
    """The sizes of the synthetic model, a Llama with random weights."""

    hidden: int
    mlp: int
    heads: int
    layers: int
    vocabulary: int


SEVEN_B_LAYERS = Sizes(4096, 11_008, 32, 2, 32_000)
QUICK_LAYERS = Sizes(1024, 2752, 8, 2, 8000)


@dataclass
class Base:
    """A model in bfloat16 with a tokenizer, saved in ``folder``."""

    name: str
    model: Any
    tokenizer: Any
    folder: Path
    spec: BaseSpec

    @property
    def bf16_bytes(self) -> int:
        return 2 * self.spec.num_parameters


def twin(model: Any) -> Any:
    """Return a model with its own modules and shared weights, so that two sides can hook or wrap it separately."""
    return copy.deepcopy(model, {id(parameter): parameter for parameter in model.parameters()})


def llama(sizes: Sizes, vocabulary: int, **more: Any) -> Any:
    """Return a bfloat16 Llama with random weights."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=sizes.hidden,
        intermediate_size=sizes.mlp,
        num_hidden_layers=sizes.layers,
        num_attention_heads=sizes.heads,
        num_key_value_heads=sizes.heads,
        max_position_embeddings=2048,
        dtype=torch.bfloat16,
        **more,
    )
    model: Any = LlamaForCausalLM(config)
    return model.to(dtype=torch.bfloat16).eval()


def synthetic(sizes: Sizes, folder: Path) -> Base:
    """Create the synthetic model, with the same random weights in every run."""
    from transformers import GenerationConfig

    model = llama(sizes, sizes.vocabulary, tie_word_embeddings=False)
    # The end token is almost never the most likely one, so answers have the requested length.
    model.generation_config = GenerationConfig(
        eos_token_id=sizes.vocabulary - 1, pad_token_id=0, do_sample=False
    )
    model.config.eos_token_id = sizes.vocabulary - 1
    model.save_pretrained(folder)
    tokenizer = words(sizes.vocabulary)
    tokenizer.save_pretrained(folder)
    return Base(
        f"{sizes.layers} layers, {sizes.hidden} wide", model, tokenizer, folder, described(model, folder)
    )


def seven_b_layers(tokenizer: Path, folder: Path) -> None:
    """Write two layers of a 7B model with random weights and a real tokenizer, for programs that need one."""
    from transformers import AutoTokenizer

    taken = AutoTokenizer.from_pretrained(tokenizer)
    ends = {"eos_token_id": taken.eos_token_id, "bos_token_id": taken.bos_token_id}
    llama(SEVEN_B_LAYERS, len(taken), tie_word_embeddings=True, **ends).save_pretrained(folder)
    taken.save_pretrained(folder)


def words(vocabulary: int) -> Any:
    """Return a tokenizer whose tokens are the words w0, w1, ..., so that each token is shown immediately."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import WhitespaceSplit
    from transformers import PreTrainedTokenizerFast

    made = Tokenizer(WordLevel({f"w{number}": number for number in range(vocabulary)}, unk_token="w0"))
    made.pre_tokenizer = WhitespaceSplit()
    last = f"w{vocabulary - 1}"
    return PreTrainedTokenizerFast(tokenizer_object=made, eos_token=last, pad_token="w0", unk_token="w0")


def saved(name: str, folder: Path) -> Base:
    """Save a model, such as SmolLM2, as a bfloat16 folder."""
    loaded = load_model(str(folder), dtype="bfloat16")
    return Base(name, loaded.model, loaded.tokenizer, folder, described(loaded.model, folder))


def described(model: Any, folder: Path) -> BaseSpec:
    """Return the spec of a model folder for `gym api`, which is computed from the weights in float32."""
    return BaseSpec.of({name: tensor.float() for name, tensor in model_tensors(model).items()}, folder.name)


def one_bit(base: Base, folder: Path, number: int) -> Path:
    """Write a one-bit variant of all matrices, including embeddings and head: random signs and small scales per row."""

    def scales(name: str, rows: int) -> Tensor:
        return torch.full((rows, 1), 1e-3)

    return random_signs(base.spec, folder / f"v{number}.gymdelta", 1000 + number, scales)


def random_signs(spec: BaseSpec, file: Path, seed: int, scales: Callable[[str, int], Tensor]) -> Path:
    """Write a delta of random signs for every matrix; ``scales`` returns a column for a name and number of rows."""
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
    """Write distinct random LoRA adapters of rank 16 on all linear layers, as PEFT folders and as `.gymdelta` files."""
    from peft import LoraConfig, get_peft_model

    made = [(folder / f"lora{number}", folder / f"lora{number}.gymdelta") for number in range(count)]
    if all(delta.exists() for _, delta in made):
        return made
    config = LoraConfig(r=RANK, lora_alpha=2 * RANK, target_modules=LORA_TARGETS, task_type="CAUSAL_LM")
    model: Any = get_peft_model(twin(base.model), config)
    for number, (peft_folder, delta) in enumerate(made):
        torch.manual_seed(2000 + number)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "lora_" in name:
                    parameter.normal_(0.0, 0.01)
        model.save_pretrained(str(peft_folder))
        lora_delta(lora_factors(model), delta, base.spec)
    return made
