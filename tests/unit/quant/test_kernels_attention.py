"""Attention over a paged KV cache: right, and the same whatever is beside a request and however its prompt is cut."""

from __future__ import annotations

from array import array
from dataclasses import dataclass

import pytest
import torch
from gym_quant import CodecError, kernels
from gym_quant.kernels import BLOCK_TOKENS, KV_DTYPES, PagedLayer, PagedSpans, attend
from torch import Tensor

NATIVE = [name for name in kernels.available() if name != "torch"]
# heads, kv_heads, dim, value_dim
SHAPES = [(9, 3, 64, 64), (4, 4, 8, 8), (14, 2, 20, 36), (5, 1, 128, 128)]
LENGTHS = [1, 17, 150, 40]
BOUNDS = {"float32": 5e-6, "bfloat16": 3e-2, "int8": 6e-2}


@dataclass
class Text:
    query: Tensor
    key: Tensor
    value: Tensor
    blocks: array[int]

    def truth(self, scale: float, window: int | None) -> Tensor:
        """In float64, of the whole text at once."""
        groups = self.query.shape[1] // self.key.shape[1]
        key, value = (one.double().repeat_interleave(groups, 1) for one in (self.key, self.value))
        scores = torch.einsum("qhd,khd->hqk", self.query.double(), key) * scale
        places = torch.arange(len(key))[:, None] - torch.arange(len(key))
        hidden = (places < 0) | (places >= (window or len(key)))
        weights = scores.masked_fill(hidden, float("-inf")).softmax(2)
        return torch.einsum("hqk,khd->qhd", weights, value)


def texts_of(shape: tuple[int, int, int, int], dtype: str, seed: int = 0) -> tuple[list[Text], PagedLayer]:
    """Texts whose blocks lie anywhere, among blocks full of what is no number."""
    heads, kv_heads, dim, value_dim = shape
    generator = torch.Generator().manual_seed(seed)
    layer = PagedLayer(40, kv_heads, dim, value_dim, dtype)
    layer.data.fill_(255)
    free = torch.randperm(40, generator=generator).tolist()
    found = []
    for length in LENGTHS:
        parts = [
            torch.randn(length, count, size, generator=generator)
            for count, size in ((heads, dim), (kv_heads, dim), (kv_heads, value_dim))
        ]
        count = -(-length // BLOCK_TOKENS)
        found.append(Text(*parts, array("i", free[:count])))
        free = free[count:]
    return found, layer


def run(texts: list[Text], layer: PagedLayer, cut: int, window: int | None) -> list[Tensor]:
    """Chunks of ``cut`` tokens of all texts in one call, as columns of a fused projection."""
    found: list[list[Tensor]] = [[] for _ in texts]
    done = [0] * len(texts)
    while any(at < len(text.query) for at, text in zip(done, texts, strict=True)):
        spans, rows, places = [], [], []
        for place, text in enumerate(texts):
            part = slice(done[place], done[place] + cut)
            some = [one[part].flatten(1) for one in (text.query, text.key, text.value)]
            if len(some[0]):
                start = spans[-1][1] if spans else 0
                spans.append((start, start + len(some[0]), done[place], text.blocks))
                rows.append(torch.cat(some, dim=1))
                places.append(place)
        heads, kv_heads, dim = texts[0].query.shape[1], layer.kv_heads, layer.dim
        fused = torch.cat(rows)
        query, key, value = fused.split([heads * dim, kv_heads * dim, kv_heads * layer.value_dim], dim=1)
        out = torch.full((len(fused), heads, layer.value_dim), float("nan"))
        attend(
            layer,
            PagedSpans(spans),
            query.unflatten(1, (heads, dim)),
            key.unflatten(1, (kv_heads, dim)),
            value.unflatten(1, (kv_heads, layer.value_dim)),
            out,
            scale=dim**-0.5,
            window=window,
        )
        for place, (start, stop, _, _) in zip(places, spans, strict=True):
            found[place].append(out[start:stop])
            done[place] += stop - start
    return [torch.cat(parts) for parts in found]


@pytest.mark.few(16, "one kernel for every shape")
@pytest.mark.parametrize("path", kernels.available())
@pytest.mark.parametrize("dtype", KV_DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_every_token_attends_to_what_came_before_it(
    path: str, dtype: str, shape: tuple[int, int, int, int]
) -> None:
    for window in (None, 5, 130):
        texts, layer = texts_of(shape, dtype)
        with kernels.using(path):
            found = run(texts, layer, 64, window)
        for text, one in zip(texts, found, strict=True):
            assert float((one - text.truth(shape[2] ** -0.5, window)).abs().max()) < BOUNDS[dtype]


@pytest.mark.skipif(not NATIVE, reason="there is no native code here")
@pytest.mark.parametrize("dtype", KV_DTYPES)
@pytest.mark.parametrize("window", [None, 20])
def test_a_row_has_the_same_bits_on_every_path_in_every_batch_and_in_chunks_of_any_size(
    dtype: str, window: int | None
) -> None:
    shape = SHAPES[0]
    texts, layer = texts_of(shape, dtype)
    with kernels.using(NATIVE[-1]):
        wanted = run(texts, layer, 1, window)
    threads = torch.get_num_threads()
    try:
        for path in NATIVE:
            for cut in (13, 200):
                for count in (1, 2):
                    torch.set_num_threads(count)
                    texts, layer = texts_of(shape, dtype)
                    with kernels.using(path):
                        together = run(texts, layer, cut, window)
                        alone = run(texts[2:3], layer, cut, window)[0]
                    assert torch.equal(alone, wanted[2])
                    assert all(torch.equal(a, b) for a, b in zip(together, wanted, strict=True))
    finally:
        torch.set_num_threads(threads)


@pytest.mark.skipif(not NATIVE, reason="there is no native code here")
@pytest.mark.parametrize("dtype", KV_DTYPES)
def test_native_code_writes_the_blocks_that_the_reference_writes(dtype: str) -> None:
    held = []
    for path in (*NATIVE, "torch"):
        texts, layer = texts_of((4, 2, 8, 12), dtype)
        # Halfway between two numbers: of bfloat16, and of int8 by the head's largest.
        texts[1].key[0, :] = torch.tensor([1 + 2**-8, 1 + 3 * 2**-8, -1 - 2**-8, 0.5, 127.0, 2.5, -3.5, 0.0])
        with kernels.using(path):
            run(texts, layer, 30, None)
        for text in texts:
            keys, values = layer.read(text.blocks, 0, len(text.key), torch.float32)
            held.append((keys, values))
            spread = float(text.key.abs().max()) / (100 if dtype != "float32" else 1e9)
            assert float((keys.transpose(0, 1) - text.key).abs().max()) <= spread
    for at, (keys, values) in enumerate(held):
        assert torch.equal(keys, held[at % len(LENGTHS)][0])
        assert torch.equal(values, held[at % len(LENGTHS)][1])


@pytest.mark.parametrize("path", kernels.available())
@pytest.mark.parametrize("dtype", KV_DTYPES)
def test_a_request_that_is_no_number_spoils_no_other(path: str, dtype: str) -> None:
    texts, layer = texts_of(SHAPES[0], dtype)
    with kernels.using(path):
        wanted = run(texts, layer, 64, None)
        texts, layer = texts_of(SHAPES[0], dtype)
        texts[1].key[3] = float("nan")
        texts[1].value[5, 0] = float("inf")
        found = run(texts, layer, 64, None)
    for place in (0, 2, 3):
        assert torch.equal(found[place], wanted[place])
    assert not torch.isfinite(found[1][3:]).all()
    assert torch.isfinite(found[0]).all()


@pytest.mark.parametrize("path", kernels.available())
def test_keys_and_values_of_zeros_are_kept_as_zeros_in_int8(path: str) -> None:
    texts, layer = texts_of(SHAPES[1], "int8")
    for text in texts:
        text.key.zero_()
        text.value.zero_()
    with kernels.using(path):
        assert all(torch.equal(one, torch.zeros_like(one)) for one in run(texts, layer, 9, None))


def test_what_does_not_fit_is_refused() -> None:
    layer = PagedLayer(4, 2, 8, 8, "float32")
    table = array("i", [0, 1])
    query, key = torch.zeros(3, 4, 8), torch.zeros(3, 2, 8)
    spans = PagedSpans([(0, 3, 20, table)])
    out = torch.empty(3, 4, 8)
    for wrong in (
        {"query": torch.zeros(3, 3, 8)},
        {"query": torch.zeros(2, 4, 8)},
        {"key": torch.zeros(3, 1, 8)},
        {"value": torch.zeros(3, 2, 4)},
        {"out": torch.empty(3, 4, 4)},
        {"query": query.double()},
        {"key": torch.zeros(3, 8, 2).transpose(1, 2)},
    ):
        given = {"query": query, "key": key, "value": key, "out": out, **wrong}
        with pytest.raises(CodecError):
            attend(layer, spans, **given, scale=1.0)
    with pytest.raises(CodecError, match="window of 0"):
        attend(layer, spans, query, key, key, out, scale=1.0, window=0)
    with pytest.raises(CodecError, match="3 blocks"):
        PagedSpans([(0, 3, 32, table)])
    with pytest.raises(CodecError, match="do not follow"):
        PagedSpans([(1, 3, 0, table)])
    with pytest.raises(CodecError, match="not float16"):
        PagedLayer(4, 2, 8, 8, "float16")
    if NATIVE:
        with pytest.raises(CodecError, match="no block 9"):
            attend(layer, PagedSpans([(0, 3, 0, array("i", [9]))]), query, key, key, out, scale=1.0)
