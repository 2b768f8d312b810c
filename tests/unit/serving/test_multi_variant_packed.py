"""Every codec of the registry in serving: its packed form, and the answers of the merged model."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from gym_quant import codec_names, get_codec, kernels, registry
from gym_quant.codec import Encoded
from gym_quant.kernels import ResidentSigns
from gym_quant.registry import CODECS
from gym_quant.resident import Transposed

from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.delta.base import BaseSpec, model_tensors
from gym_fed.delta.writer import DeltaEntry, write_delta
from gym_fed.serving.forward.chunk import Chunk
from gym_fed.serving.forward.multi_variant import MultiVariantModel
from gym_fed.serving.forward.target_modules import ModelLayout
from gym_fed.serving.forward.variant_weights import DenseWeight, PackedWeight
from tests.support.codec_settings import settings_of
from tests.support.quick import quick
from tests.support.variants import load, merged, off
from tests.unit.serving.test_multi_variant_models import build
from tests.unit.serving.test_multi_variant_step import llama, reference

LONG, SHORT = [5, 9, 2, 44, 17, 3, 8], [7, 1]
BULK = 4
"""Rows from which on a span is multiplied as a whole: the long prompt is, the short one is not."""


CHANGED = (
    "embed_tokens",
    "layers.0.self_attn.q_proj",
    "layers.0.mlp.down_proj",
    ".wte.",
    "c_attn",
    "mlp.c_proj",
)
"""Of Llama (whose head is tied) and of GPT-2: an embedding and head, and two linear layers."""


@functools.cache
def encoded(name: str, at: int, shape: tuple[int, ...]) -> Encoded:
    """A delta in the codec's setting ``at``; once for all tests, since some codecs search."""
    delta = torch.randn(shape, generator=torch.Generator().manual_seed(at)) * 0.05
    return get_codec(name).encode(delta, **settings_of(name)[at])


def entry(tensor: str, name: str, at: int, shape: tuple[int, ...]) -> DeltaEntry:
    made = encoded(name, at, shape)
    return DeltaEntry(tensor, shape, name, made.params, lambda: made.payload)


def variants_of(model: Any, folder: Path, *names: str) -> list[Path]:
    """One for every setting of the codecs."""
    shapes = {
        n: tuple(t.shape) for n, t in model_tensors(model).items() if any(part in n for part in CHANGED)
    }
    shapes = {n: shape for n, shape in shapes.items() if len(shape) == 2}
    spec, paths = BaseSpec.of(model, "base"), []
    for name in names:
        for at in range(len(settings_of(name))):
            paths.append(folder / f"{name}{at}.gymdelta")
            write_delta(paths[-1], [entry(n, name, at, shape) for n, shape in shapes.items()], spec)
    return paths


def answers(served: MultiVariantModel, paths: list[Path]) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits after the long and the short prompt of every variant, all in one step beside the base's own."""
    served._variants.bulk_rows = BULK
    held = [load(path, served.layout) for path in paths]
    chunks = [Chunk(ids, served.new_cache(), variant) for variant in held for ids in (LONG, SHORT)]
    found = served.step([*chunks, Chunk(LONG, served.new_cache())])[:-1]
    return found[::2], found[1::2]


def require_merged_answers(model: Any, paths: list[Path], name: str) -> None:
    """Bulk and few rows alike: what each merged model answers, in float32."""
    wanted = [merged(model, path) for path in paths]
    with MultiVariantModel(model) as served:
        bulk, few = answers(served, paths)
    for at, peer in enumerate(wanted):
        assert off(bulk[at], reference(peer, LONG)[-1]) < 1e-4, settings_of(name)[at]
        assert off(few[at], reference(peer, SHORT)[-1]) < 1e-4, settings_of(name)[at]


@pytest.mark.parametrize("name", codec_names())
def test_answers_are_those_of_the_base_with_the_decoded_delta(tmp_path: Path, name: str) -> None:
    model = llama()
    require_merged_answers(model, variants_of(model, tmp_path, name), name)


@pytest.mark.parametrize("name", quick(codec_names(), "bitdelta", "int4", "lora"))
def test_bfloat16_answers_are_as_near_to_the_truth_as_the_merged_model_s(tmp_path: Path, name: str) -> None:
    """Truth: the merged model of the same bfloat16 weights, computed in float32."""
    model, wide = llama().to(torch.bfloat16), llama().to(torch.bfloat16).to(torch.float32)
    paths = variants_of(model, tmp_path, name)
    truth, peers = ([merged(base, path) for path in paths] for base in (wide, model))
    with MultiVariantModel(model) as served:
        found = answers(served, paths)
    for ids, rows in zip((LONG, SHORT), found, strict=True):
        for at, row in enumerate(rows):
            true = reference(truth[at], ids)[-1]
            assert off(row, true) < 2 * off(reference(peers[at], ids)[-1], true) + 5e-3, settings_of(name)[at]
            assert off(row, true) < 0.03 * float(true.abs().max()), settings_of(name)[at]


@pytest.mark.parametrize("name", quick(codec_names(), "bitdelta", "int4", "lora"))
def test_matrices_that_lie_the_other_way_round_stay_packed_too(tmp_path: Path, name: str) -> None:
    model = build("GPT2", n_embd=48, n_layer=1, n_head=4, n_positions=64)
    paths = variants_of(model, tmp_path, name)
    require_merged_answers(model, paths, name)
    weight = load(paths[0], ModelLayout.of(model)).weights["transformer.h.0.mlp.c_proj.weight"]
    made = encoded(name, 0, (192, 48))
    form = get_codec(name).resident(made.payload, (192, 48), made.params, torch.device("cpu"))
    assert isinstance(weight, DenseWeight) == (form is None)
    assert not isinstance(weight, PackedWeight) or isinstance(weight.held, Transposed)


def test_products_are_counted_by_form_and_signs_by_kernel(tmp_path: Path) -> None:
    model = llama()
    paths = {path.stem: path for path in variants_of(model, tmp_path, "binary", "int4", "lora")}
    linear = ("lm_head", "model.layers.0.self_attn.q_proj", "model.layers.0.mlp.down_proj")
    with MultiVariantModel(model, kernel="lookup") as served:
        held = {name: load(path, served.layout) for name, path in paths.items() if name.endswith("0")}
        served.step([Chunk(SHORT, served.new_cache(), held[name]) for name in ("lora0", "int40")])
        assert not any(served.sign_products.values())
        assert served.packed_products == {"levels": len(linear)}
        served.step([Chunk(SHORT, served.new_cache(), held["binary0"])])
        assert served.sign_products == {"exact": 0, "lookup": len(linear), "lookup16": 0, "decoded": 0}
        served._variants.bulk_rows = BULK
        served.step([Chunk(LONG, served.new_cache(), held["binary0"], wants_logits=False)])
        assert served.sign_products == {"exact": 0, "lookup": len(linear), "lookup16": 0, "decoded": 2}
        assert served.packed_products == {"levels": len(linear)}


def test_evenly_spaced_levels_are_multiplied_by_look_up_and_answer_as_the_merged_model(
    tmp_path: Path,
) -> None:
    model = llama()
    paths = [variants_of(model, tmp_path, name)[0] for name in ("ternary", "int2", "int4")]
    answered = [reference(merged(model, path), SHORT)[-1] for path in paths]
    for kernel, most in (("lookup", 0.05), ("lookup16", 1e-3)):
        with MultiVariantModel(model, kernel=kernel) as served:
            for path, wanted in zip(paths, answered, strict=True):
                found = served.step([Chunk(SHORT, served.new_cache(), load(path, served.layout))])[0]
                assert off(found, wanted) < most * float(wanted.abs().max()), (kernel, path.stem)
            if kernels.path() != "torch":
                assert served.products["levels", kernel] > 0
                assert not served.products["levels", "decoded"]


def test_look_up_refuses_groups_of_signs_that_it_cannot_read_and_no_other_form(tmp_path: Path) -> None:
    model = llama()
    layout = ModelLayout.of(model, "lookup")
    odd = [{"group_size": 5}, {"group_size": 5, "symmetric": False}]
    signs, levels = (settings_of("binary").index(params) for params in odd)
    paths = variants_of(model, tmp_path, "binary")
    with pytest.raises(GymError, match="group_size 5 is not a multiple of 8") as refused:
        load(paths[signs], layout)
    assert refused.value.code is ErrorCode.DELTA_INVALID
    assert load(paths[levels], layout).resident_bytes > 0


PLUG_IN = """
from gym_quant.codecs.dense import Dense
from gym_quant.resident import ResidentLevels

class Silent(Dense):
    name = "silent"

class Speaking(Dense):
    name = "speaking"

    def resident(self, payload, shape, params, device):
        return ResidentLevels(payload, *shape, lambda fields: fields["values"].float(), device)
"""


def test_a_codec_of_another_package_is_dense_or_stays_as_it_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "two_codecs.py").write_text(PLUG_IN)
    facts = tmp_path / "two_codecs-1.0.dist-info"
    facts.mkdir()
    (facts / "METADATA").write_text("Metadata-Version: 2.1\nName: two-codecs\nVersion: 1.0\n")
    (facts / "entry_points.txt").write_text(
        "[gym_fed.codecs]\nsilent = two_codecs:Silent\nspeaking = two_codecs:Speaking\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(CODECS, "_types", dict(CODECS._types))
    forget = (registry._all_installed.cache_clear, get_codec.cache_clear)
    try:
        for clear in forget:
            clear()
        model = llama()
        paths = variants_of(model, tmp_path, "silent", "speaking")
        wanted = [reference(merged(model, path), LONG)[-1] for path in paths]
        with MultiVariantModel(model) as served:
            bulk, _ = answers(served, paths)
            held = [load(path, served.layout).weights["model.embed_tokens.weight"] for path in paths]
            assert served.packed_products["levels"] > 0
    finally:
        for clear in forget:
            clear()
    assert [type(weight) for weight in held] == [DenseWeight, PackedWeight]
    for row, peer in zip(bulk, wanted, strict=True):
        assert off(row, peer) < 1e-4


def test_symmetric_binary_is_served_in_the_bytes_of_bitdelta(tmp_path: Path) -> None:
    model = llama()
    layout = ModelLayout.of(model)
    held = [load(variants_of(model, tmp_path, name)[0], layout) for name in ("binary", "bitdelta")]
    assert held[0].resident_bytes == held[1].resident_bytes
    weight = held[0].weights["model.layers.0.mlp.down_proj.weight"]
    assert isinstance(weight, PackedWeight)
    assert isinstance(weight.held, ResidentSigns)
