"""A step of many variants gives every row what a model merged with its variant gives."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from gym_fed.serving.mixed import MixedModel, Piece
from tests.support.variants import Coding, load, merged, write_random_delta

PROMPTS = [[5, 9, 2, 44, 17, 3, 8], [1, 2, 3], [90, 80, 70, 60, 50], [7, 7, 9, 11], [33, 4, 12, 60, 2, 9]]


def llama(**changes: Any) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 48, "intermediate_size": 84, "num_hidden_layers": 2, "vocab_size": 97}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128}
    return LlamaForCausalLM(LlamaConfig(**{**sizes, **heads, "tie_word_embeddings": True, **changes})).eval()


def signs(**params: Any) -> Any:
    def rule(_name: str, shape: tuple[int, ...]) -> Coding:
        return ("bitdelta", params) if len(shape) == 2 else ("dense", {"dtype": "float32"})

    return rule


def lora(_name: str, shape: tuple[int, ...]) -> Coding:
    return ("lora", {"rank": 4, "factors": "float32", "scaling": 2.0}) if len(shape) == 2 else None


def whole(codec: str, **params: Any) -> Any:
    def rule(_name: str, shape: tuple[int, ...]) -> Coding:
        return (codec, params) if len(shape) == 2 else ("dense", {})

    return rule


RULES = {
    "tensor": signs(),
    "row": signs(group_size=1 << 20),
    "group": signs(group_size=16),
    "odd": signs(group_size=5),
    "lora": lora,
    "int8": whole("int8"),
    "dense": whole("dense", dtype="float32"),
}


def reference(model: Any, ids: list[int]) -> torch.Tensor:
    with torch.inference_mode():
        return model(torch.tensor([ids]), use_cache=False).logits[0].float()


def off(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((found - wanted).abs().max())


def generate(
    mixed: MixedModel, prompts: list[list[int]], variants: list[Any], cut: int, more: int
) -> list[Any]:
    """Prompts in pieces of ``cut`` tokens, all requests at once, then ``more`` tokens of each; logits of all steps."""
    caches = [mixed.new_cache(4) for _ in prompts]
    found: list[list[torch.Tensor]] = [[] for _ in prompts]
    todo = [[*p, *range(10, 10 + more)] for p in prompts]
    while any(todo):
        live = [at for at, left in enumerate(todo) if left]
        pieces, ends = [], []
        for at in live:
            read = caches[at].length
            n = min(cut, len(prompts[at]) - read) if read < len(prompts[at]) else 1
            pieces.append(Piece(todo[at][:n], caches[at], variants[at], read + n >= len(prompts[at])))
            todo[at] = todo[at][n:]
            ends.append(at)
        logits = mixed.step(pieces)
        wanting = [at for at, piece in zip(ends, pieces, strict=True) if piece.wants_logits]
        for at, row in zip(wanting, logits, strict=True):
            found[at].append(row)
    return [torch.stack(rows) for rows in found]


@pytest.mark.parametrize("cut", [1, 3, 100])
def test_every_row_of_a_mixed_batch_gets_what_its_merged_model_says(tmp_path: Path, cut: int) -> None:
    model = llama()
    before = {name: p.clone() for name, p in model.named_parameters()}
    paths = {
        n: write_random_delta(model, tmp_path / f"{n}.gymdelta", r, seed=i)
        for i, (n, r) in enumerate(RULES.items())
    }
    wanted = []
    names = [*RULES, "", "tensor"]
    prompts = [PROMPTS[at % len(PROMPTS)] for at in range(len(names))]
    for name, prompt in zip(names, prompts, strict=True):
        target = merged(model, paths[name]) if name else model
        wanted.append(reference(target, [*prompt, 10, 11, 12])[len(prompt) - 1 :])
    with MixedModel(model) as mixed:
        loaded = {name: load(path, mixed.layout) for name, path in paths.items()}
        found = generate(mixed, prompts, [loaded.get(name) for name in names], cut, 3)
    for name, a, b in zip(names, found, wanted, strict=True):
        assert off(a, b) < 1e-4, name
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())
