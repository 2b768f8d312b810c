"""A step of many variants gives every row the result of a model merged with its variant."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gym_quant.kernels import MODES
from torch.nn import functional

from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.delta.base import BaseSpec
from gym_fed.delta.writer import DeltaEntry, write_delta
from gym_fed.serving.forward.chunk import Chunk
from gym_fed.serving.forward.multi_variant import MultiVariantModel
from gym_fed.serving.forward.padded import TreeAttention
from gym_fed.serving.forward.target_modules import ModelLayout
from tests.support.variants import Coding, load, merged, off, write_random_delta

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


def generate(
    served: MultiVariantModel, prompts: list[list[int]], variants: list[Any], cut: int, more: int
) -> list[Any]:
    """Prompts in chunks of ``cut`` tokens, all requests at once, then ``more`` tokens of each; logits of all steps."""
    caches = [served.new_cache() for _ in prompts]
    found: list[list[torch.Tensor]] = [[] for _ in prompts]
    todo = [[*p, *range(10, 10 + more)] for p in prompts]
    while any(todo):
        live = [at for at, left in enumerate(todo) if left]
        chunks, ends = [], []
        for at in live:
            read = caches[at].length
            n = min(cut, len(prompts[at]) - read) if read < len(prompts[at]) else 1
            chunks.append(Chunk(todo[at][:n], caches[at], variants[at], read + n >= len(prompts[at])))
            todo[at] = todo[at][n:]
            ends.append(at)
        logits = served.step(chunks)
        wanting = [at for at, chunk in zip(ends, chunks, strict=True) if chunk.wants_logits]
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
    with MultiVariantModel(model) as served:
        loaded = {name: load(path, served.layout) for name, path in paths.items()}
        found = generate(served, prompts, [loaded.get(name) for name in names], cut, 3)
    for name, a, b in zip(names, found, wanted, strict=True):
        assert off(a, b) < 1e-4, name
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())


def test_rows_without_a_variant_get_what_the_base_s_own_step_gives_them(tmp_path: Path) -> None:
    model = llama()
    path = write_random_delta(model, tmp_path / "v.gymdelta", signs(), seed=0)
    with MultiVariantModel(model) as served:
        variant = load(path, served.layout)
        alone = served.step([Chunk(p, served.new_cache()) for p in PROMPTS])
        beside = served.step(
            [Chunk(p, served.new_cache(), variant if n == 1 else None) for n, p in enumerate(PROMPTS)]
        )
    others = [0, 2, 3, 4]
    assert torch.equal(beside[others], alone[others])
    assert off(beside[1], alone[1]) > 1e-3


def test_long_prompts_are_multiplied_as_matrices_and_give_the_same(tmp_path: Path) -> None:
    model = llama()
    path = write_random_delta(model, tmp_path / "v.gymdelta", signs(group_size=16), seed=0)
    with MultiVariantModel(model) as served:
        variant = load(path, served.layout)
        found = []
        for bulk in (1, 3, 1000):
            served._variants.bulk_rows = bulk
            found.append(served.step([Chunk(p, served.new_cache(), variant) for p in PROMPTS]))
    assert off(found[0], found[2]) < 1e-5
    assert off(found[1], found[2]) < 1e-5


@pytest.mark.parametrize("path", ["scalar", "torch"])
def test_every_kernel_s_path_gives_the_same(tmp_path: Path, path: str) -> None:
    from gym_quant.kernels import dispatch

    if path not in dispatch.available():
        pytest.skip(f"no path {path} here")
    model = llama()
    delta = write_random_delta(model, tmp_path / "v.gymdelta", signs(group_size=16), seed=0)
    with MultiVariantModel(model) as served:
        held = load(delta, served.layout)
        best = served.step([Chunk(p, served.new_cache(), held) for p in PROMPTS])
        with dispatch.using(path):
            made_here = load(delta, served.layout)
            for variant in (held, made_here):
                found = served.step([Chunk(p, served.new_cache(), variant) for p in PROMPTS])
                assert off(found, best) < 1e-5


@pytest.mark.parametrize("kernel", MODES)
def test_a_variant_that_overflows_spoils_its_own_rows_alone(tmp_path: Path, kernel: Any) -> None:
    model = llama()
    spec = BaseSpec.of(model, "base")
    name = "model.layers.0.self_attn.q_proj.weight"
    huge = {"a": torch.full((1, 48), 3e38), "b": torch.full((48, 1), 1.0)}
    bomb = DeltaEntry(name, (48, 48), "lora", {"rank": 1, "factors": "float32"}, lambda: huge)
    write_delta(tmp_path / "bomb.gymdelta", [bomb], spec)
    loud = [DeltaEntry.of(name, torch.full((48, 48), 1e38))]
    write_delta(tmp_path / "loud.gymdelta", loud, spec)
    rules = {"lora": lora, "signs": signs()}
    for at, (known, rule) in enumerate(rules.items()):
        write_random_delta(model, tmp_path / f"{known}.gymdelta", rule, seed=at)
    with MultiVariantModel(model, kernel=kernel) as served:
        good = [load(tmp_path / f"{n}.gymdelta", served.layout) for n in rules]
        bad = [load(tmp_path / f"{n}.gymdelta", served.layout) for n in ("bomb", "loud")]
        alone = served.step([Chunk(p, served.new_cache(), v) for p, v in zip(PROMPTS, good, strict=False)])
        both = served.step(
            [Chunk(p, served.new_cache(), v) for p, v in zip(PROMPTS, [*good, *bad], strict=False)]
        )
    assert off(both[:2], alone) < 1e-5
    assert not torch.isfinite(both[2:]).all()


def test_a_delta_beyond_the_base_s_number_format_is_refused_when_loaded(tmp_path: Path) -> None:
    model = llama().to(torch.bfloat16)
    name = "model.layers.0.self_attn.q_proj.weight"
    large = {"a": torch.full((1, 48), 1e-3), "b": torch.full((48, 1), 3.4e38)}  # finite as float32 only
    entries = {
        "b": DeltaEntry(name, (48, 48), "lora", {"rank": 1, "factors": "float32"}, lambda: large),
        "a": DeltaEntry(
            name,
            (48, 48),
            "lora",
            {"rank": 1, "factors": "float32"},
            lambda: {"a": large["b"].T, "b": large["a"].T},
        ),
        "dense": DeltaEntry.of(name, torch.full((48, 48), 3.4e38), "dense", dtype="float32"),
    }
    layout = ModelLayout.of(model)
    for known, entry in entries.items():
        write_delta(tmp_path / f"{known}.gymdelta", [entry], BaseSpec.of(model, "base"))
        with pytest.raises(GymError, match=r"q_proj.*not finite in the base's bfloat16") as refused:
            load(tmp_path / f"{known}.gymdelta", layout)
        assert refused.value.code is ErrorCode.DELTA_INVALID


@pytest.mark.parametrize("kernel", MODES)
def test_the_kernel_that_multiplied_is_counted_and_no_other(tmp_path: Path, kernel: Any) -> None:
    model = llama()
    delta = write_random_delta(model, tmp_path / "v.gymdelta", signs(), seed=0)
    with MultiVariantModel(model, kernel=kernel) as served:
        held, cache = load(delta, served.layout), served.new_cache()
        served.step([Chunk(PROMPTS[0], cache), Chunk(PROMPTS[1], served.new_cache())])
        assert not any(served.sign_products.values())
        served.step([Chunk([3], cache), Chunk(PROMPTS[2], served.new_cache(), held)])
        target_modules = sum(target.kind == "linear" for target in served.layout.target_modules)
        wanted = {**dict.fromkeys((*MODES, "decoded"), 0), kernel: target_modules}
        assert dict(served.sign_products) == wanted
        served._variants.bulk_rows = 4
        served.step([Chunk(PROMPTS[2], served.new_cache(), held, wants_logits=False)])
        assert dict(served.sign_products) == {**wanted, "decoded": target_modules - 1}


def _visible(parents: list[int], lengths: list[int]) -> np.ndarray:
    """Of nodes in depth-first order, each with the number of its parent or -1."""
    ends = np.cumsum(lengths)
    seen = np.zeros((ends[-1], ends[-1]), dtype=bool)
    for parent, length, end in zip(parents, lengths, ends, strict=True):
        if parent >= 0:
            seen[end - length : end] = seen[ends[parent] - 1]
        seen[end - length : end, end - length : end] = np.tri(length, dtype=bool)
    return seen


@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (6, 2)])
def test_runs_of_trees_attend_as_all_pairs_behind_a_mask(heads: int, kv_heads: int) -> None:
    trees = [
        _visible([-1, 0, 0, 2, 2, 0], [130, 40, 3, 1, 2, 17]),
        _visible([-1], [1]),
        _visible([-1, 0, 0, 0], [9, 1, 1, 1]),
        _visible([-1], [150]),
    ]
    generator = torch.Generator().manual_seed(0)
    tokens = sum(len(one) for one in trees)
    query = torch.randn(heads, tokens, 8, generator=generator)
    key = torch.randn(kv_heads, tokens, 8, generator=generator)
    value = torch.randn(kv_heads, tokens, 4, generator=generator)
    seen = torch.block_diag(*(torch.from_numpy(one) for one in trees)).bool()
    wanted = functional.scaled_dot_product_attention(
        query[None].double(), key[None].double(), value[None].double(), attn_mask=seen, enable_gqa=True
    )[0].transpose(0, 1)
    attention = TreeAttention(trees, torch.float32, torch.device("cpu"))
    assert len(attention._products) > 1
    found = attention.attend(0, query, key, value, 8**-0.5)
    torch.testing.assert_close(found.double(), wanted, rtol=1e-5, atol=1e-5)
