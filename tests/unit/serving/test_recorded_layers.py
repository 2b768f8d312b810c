"""Recorded layers are bit-identical to layers whose calls are made from Python."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from gym_quant.kernels import dispatch

from gym_fed.serving.forward import layer_calls, multi_variant
from gym_fed.serving.forward.chunk import Chunk
from gym_fed.serving.forward.layer_calls import RecordedLayers
from gym_fed.serving.forward.multi_variant import MultiVariantModel
from gym_fed.serving.forward.trial import prepare
from tests.support.quick import quick
from tests.support.variants import load, write_random_delta
from tests.unit.serving.test_decoder import MODELS, build, texts
from tests.unit.serving.test_multi_variant_step import RULES

pytestmark = pytest.mark.skipif(dispatch.path() == "torch", reason="a recording is of native calls")
STEPS = 6
FORMATS = ("bfloat16", "int8", "int4")
CASES = [(name, base_format) for name in MODELS for base_format in FORMATS]
EACH_MODEL_ONCE = [(name, FORMATS[at % len(FORMATS)]) for at, name in enumerate(MODELS)]


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many steps a recording computed, as its only entry, without those of a start's comparisons."""
    found, run = [0], RecordedLayers.run

    def counted(self: RecordedLayers, *arguments: Any) -> None:
        found[0] += 1
        run(self, *arguments)

    def started(*arguments: Any) -> None:
        before = found[0]
        prepare(*arguments)
        found[0] = before

    monkeypatch.setattr(RecordedLayers, "run", counted)
    monkeypatch.setattr(multi_variant, "prepare", started)
    return found


def decode(served: MultiVariantModel, variants: list[Any], steps: int = STEPS) -> torch.Tensor:
    """Logits of prompts of several lengths, then of ``steps`` steps with a token of each."""
    caches = [served.new_cache() for _ in variants]
    wholes = texts(*range(2, 2 + len(variants)))
    found = [served.step([Chunk(t, c, v) for t, c, v in zip(wholes, caches, variants, strict=True)])]
    for step in range(steps):
        tokens = [(7 * step + 3 * at) % 97 for at in range(len(variants))]
        found.append(
            served.step([Chunk([t], c, v) for t, c, v in zip(tokens, caches, variants, strict=True)])
        )
    return torch.cat(found)


@pytest.mark.parametrize(("name", "base_format"), quick(CASES, *EACH_MODEL_ONCE))
def test_a_base_s_steps_have_the_same_bits(
    name: str, base_format: str, runs: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = []
    for most in (layer_calls.MAX_RECORDED_ROWS, 0):
        monkeypatch.setattr(layer_calls, "MAX_RECORDED_ROWS", most)
        with MultiVariantModel(build(name).to(torch.bfloat16), base_format=base_format) as served:
            runs[0] = 0  # without the trial's
            found.append((decode(served, [None] * 3), served.attends_plainly, runs[0]))
    assert torch.equal(found[0][0], found[1][0])
    assert found[0][1] is found[1][1]
    assert (found[0][2], found[1][2]) == (STEPS - 1, 0)  # the first of a kind is computed directly


@pytest.mark.parametrize("kernel", ["lookup", "lookup16"])
@pytest.mark.parametrize("name", ["llama biases", "qwen3"])
def test_steps_with_variants_have_the_same_bits_and_counts(
    tmp_path: Path, name: str, kernel: Any, runs: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    base = build(name, hidden_size=64, intermediate_size=96)
    paths = [
        write_random_delta(base, tmp_path / f"{rule}.gymdelta", RULES[rule], seed=at)
        for at, rule in enumerate(("row", "lora", "group"))
    ]
    found: list[tuple[torch.Tensor, Counter[Any], int]] = []
    for most in (layer_calls.MAX_RECORDED_ROWS, 0):
        monkeypatch.setattr(layer_calls, "MAX_RECORDED_ROWS", most)
        model = build(name, hidden_size=64, intermediate_size=96).to(torch.bfloat16)
        with MultiVariantModel(model, kernel=kernel, base_format="int8") as served:
            held = [load(path, served.layout) for path in paths]
            before, runs[0] = Counter(served.products), 0
            # One after the other: a recording of some variants is never run for others.
            logits = [decode(served, [*held, None, held[0]]), decode(served, [held[2], held[1]])]
            logits += [decode(served, [held[1], held[0]]), decode(served, [None, None])]
            found.append((torch.cat(logits), Counter(served.products) - before, runs[0]))
    assert torch.equal(found[0][0], found[1][0])
    assert found[0][1] == found[1][1]
    assert set(found[0][1]) > {("factors", "native")}
    assert (found[0][2], found[1][2]) == (4 * (STEPS - 1), 0)


def test_a_pool_that_grows_and_another_pool_are_recorded_anew(
    runs: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = []
    for most in (layer_calls.MAX_RECORDED_ROWS, 0):
        monkeypatch.setattr(layer_calls, "MAX_RECORDED_ROWS", most)
        with MultiVariantModel(build("llama").to(torch.bfloat16), base_format="bfloat16") as served:
            blocks = served.pool.num_blocks
            logits = [
                decode(served, [None] * 5, steps=90)
            ]  # five requests of six blocks, where there were 16
            assert served.pool.num_blocks > blocks
            served.pool = served.new_pool()
            logits.append(decode(served, [None] * 5))
            found.append(torch.cat(logits))
    assert torch.equal(*found)
    assert runs[0] > 80


def test_pools_of_one_size_are_never_taken_for_each_other(
    runs: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = []
    for most in (layer_calls.MAX_RECORDED_ROWS, 0):
        monkeypatch.setattr(layer_calls, "MAX_RECORDED_ROWS", most)
        with MultiVariantModel(build("llama").to(torch.bfloat16), base_format="bfloat16") as served:
            logits = []
            for pool in (served.new_pool(), served.new_pool()):  # as those of two engines of one model
                served.pool = pool
                logits.append(decode(served, [None] * 3))
            found.append(torch.cat(logits))
    assert torch.equal(*found)
    assert runs[0] == 2 * (STEPS - 1)


def test_a_step_on_another_path_is_recorded_anew(runs: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    paths = [path for path in dispatch.available() if path != "torch"]
    found = []
    for most in (layer_calls.MAX_RECORDED_ROWS, 0):
        monkeypatch.setattr(layer_calls, "MAX_RECORDED_ROWS", most)
        with MultiVariantModel(build("llama").to(torch.bfloat16), base_format="bfloat16") as served:
            caches, logits = [served.new_cache() for _ in range(3)], []
            for path in (*paths, paths[0]):
                with dispatch.using(path):
                    logits += [
                        served.step([Chunk([token], cache) for cache in caches]) for token in (5, 7, 9)
                    ]
            found.append(torch.cat(logits))
    assert torch.equal(*found)
    assert runs[0] >= 2 * len(paths)  # of three steps of a kind in a row the first is direct


def test_what_is_no_native_call_is_computed_directly(tmp_path: Path, runs: list[int]) -> None:
    model = build("llama", hidden_size=64, intermediate_size=96)
    dense = write_random_delta(model, tmp_path / "dense.gymdelta", RULES["dense"], seed=0)
    with MultiVariantModel(model) as served:  # float32: torch multiplies
        decode(served, [None])
    signs = write_random_delta(model, tmp_path / "signs.gymdelta", RULES["row"], seed=1)
    model = build("llama", hidden_size=64, intermediate_size=96).to(torch.bfloat16)
    with MultiVariantModel(model, kernel="lookup", base_format="int8") as served:
        runs[0] = 0
        decode(served, [load(dense, served.layout)])
        decode(served, [load(dense, served.layout), load(signs, served.layout)])
    assert runs == [0]


def test_a_comparison_with_decoded_weights_runs_no_recording(runs: list[int]) -> None:
    with MultiVariantModel(build("llama").to(torch.bfloat16), base_format="int8") as served:
        runs[0] = 0
        packed = decode(served, [None] * 3)
        assert runs[0] == STEPS - 1
        assert served._decoder is not None
        with served._decoder.compared():
            decoded = decode(served, [None] * 3)
        assert runs[0] == STEPS - 1
        assert not torch.equal(packed, decoded)
        decode(served, [None] * 3)
        assert runs[0] == 2 * (STEPS - 1)
